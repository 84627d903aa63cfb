"""Rows of a store as the command line and HTTP show them."""

from __future__ import annotations

from typing import Any

_KEYS = (
    "id",
    "name",
    "state",
    "wish",
    "step",
    "num_steps",
    "tokens",
    "loss",
    "error",
    "gang",
    "gang_epoch",
    "submitted_at",
    "started_at",
    "ended_at",
)


def job_to_dict(job: Any) -> dict[str, Any]:
    """A job, of a store or as a client sees it, as plain values; times are Unix seconds."""
    return {key: getattr(job, key) for key in _KEYS} | {"state": str(job.state)}
