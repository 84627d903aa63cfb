"""Tokens, uploads and limits as values; times are Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOCAL = "local"
"""The tenant of the command line in the service's folder."""
SCOPES = ("submit", "read", "admin", "scrape")
"""Rights of tokens: send jobs and files, look at its tenant's, all of it for everybody, and read
the service's figures (`/metrics`), which is all that Prometheus needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token without its secret, of which the store keeps the SHA-256 alone."""

    id: str
    tenant: str
    scopes: tuple[str, ...]
    created_at: float
    revoked_at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewUpload:
    """A file that has arrived."""

    id: str
    """Names the file in the tenant's folder."""
    name: str
    """Its owner's name for it; for display only."""
    purpose: str
    digest: str
    """SHA-256 of its bytes."""
    size: int
    facts: Mapping[str, Any]
    """Further facts that were found while it was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload(NewUpload):
    """A file of a tenant."""

    number: int
    """Grows with every upload; pages of uploads follow it."""
    tenant: str
    created_at: float
    deleted_at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantLimits:
    """How much a tenant may have at a time."""

    gpus: int | None = None
    """GPUs that its training jobs ask for together; None: all."""
    jobs: int = 1000
    """Unfinished jobs."""
    upload_bytes: int = 10 * 10**9
    """Bytes of all files, and of the requests of models that clients drive."""
    requests_per_s: float = 50.0
