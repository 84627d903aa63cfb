"""Who looks, and what of others' jobs it may see: that they are there, and nothing else."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from tlora_megatron.service.store import Job

_KEY = secrets.token_bytes(32)
"""Others' jobs get their names for strangers with it; a new process gives new ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Viewer:
    """A tenant, or an admin, who sees all tenants' jobs."""

    tenant: str
    sees_all: bool = False

    @property
    def scope(self) -> str | None:
        """The tenant to whose jobs lists are restricted; None for all."""
        return None if self.sees_all else self.tenant

    def may_see(self, job: Job | None) -> bool:
        """True if the viewer may know what a job is."""
        return job is not None and (self.sees_all or job.tenant == self.tenant)

    def stranger(self, job: str) -> str:
        """A name for a job of somebody else, the same as long as this process lives."""
        text = f"{self.tenant}\0{job}".encode()
        return "~" + hmac.new(_KEY, text, hashlib.sha256).hexdigest()[:8]

    def name(self, job: str, row: Job | None) -> dict[str, Any]:
        """How a job is named to the viewer."""
        if row is None or not self.may_see(row):
            return {"id": self.stranger(job), "own": False}
        named: dict[str, Any] = {"id": row.id, "own": True, "name": row.name}
        return {**named, "tenant": row.tenant} if self.sees_all else named
