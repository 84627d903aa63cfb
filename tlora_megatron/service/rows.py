"""Rows of a store as the command line and HTTP show them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """A job; times are Unix seconds."""

    id: str
    name: str
    state: str
    wish: str | None
    step: int
    num_steps: int | None
    tokens: int
    loss: float | None
    error: str | None
    gang: str | None
    gang_epoch: int | None
    submitted_at: float
    started_at: float | None
    ended_at: float | None


def job_to_dict(job: Any) -> dict[str, Any]:
    """A job, of a store or as a client sees it, as plain values."""
    row = {item.name: getattr(job, item.name) for item in fields(JobRow)}
    return row | {"state": str(job.state)}
