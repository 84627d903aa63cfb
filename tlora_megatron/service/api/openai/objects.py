"""A service's rows as the objects of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_megatron.service.api.openai.names import adapter_name, results_id
from tlora_megatron.service.store import Job, JobState, Upload

DOOR = "openai"
"""Value of `asked.door` in the document of a job that came in here."""

STATUS: Mapping[JobState, str] = {
    JobState.VALIDATING: "validating_files",
    JobState.QUEUED: "queued",
    JobState.STARTING: "running",
    JobState.RUNNING: "running",
    JobState.SAVING: "running",
    JobState.MOVING: "running",
    JobState.PAUSED: "paused",
    JobState.FINISHED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}


def job_object(job: Job, asked: Mapping[str, Any]) -> dict[str, Any]:
    """A job.

    Args:
        job: Its row.
        asked: What was remembered of the request that made it.
    """
    is_over = job.state.is_over
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": int(job.submitted_at),
        "finished_at": int(job.ended_at) if job.ended_at is not None else None,
        "estimated_finish": None,
        "model": asked["model"],
        "fine_tuned_model": model_of(job, asked) if job.state is JobState.FINISHED else None,
        "organization_id": job.tenant,
        "status": STATUS[job.state],
        "training_file": asked["training_file"],
        "validation_file": asked["validation_file"],
        "result_files": [results_id(job.id)] if is_over and job.step else [],
        "seed": asked["seed"],
        "hyperparameters": asked["hyperparameters"],
        "method": {
            "type": "supervised",
            "supervised": {"hyperparameters": asked["hyperparameters"]},
        },
        "metadata": asked["metadata"],
        "integrations": [],
        "trained_tokens": job.tokens if is_over else None,
        "user_provided_suffix": asked["suffix"],
        "error": _error(job),
    }


def model_of(job: Job, asked: Mapping[str, Any]) -> str:
    """Name of the model that a job trains."""
    return adapter_name(asked["model"], job.tenant, asked["suffix"], job.id)


def _error(job: Job) -> dict[str, Any] | None:
    if job.state is not JobState.FAILED:
        return None
    was_read = job.stats is not None
    return {
        "code": "training_failed" if was_read else "invalid_training_file",
        "message": job.error or "the service says no more",
        "param": None if was_read else "training_file",
    }


def file_object(upload: Upload) -> dict[str, Any]:
    """An uploaded file."""
    return {
        "id": upload.id,
        "object": "file",
        "bytes": upload.size,
        "created_at": int(upload.created_at),
        "expires_at": None,
        "filename": upload.name,
        "purpose": upload.purpose,
        "status": "processed",
        "status_details": None,
        "sha256": upload.digest,
    }


def results_object(job: Job, size: int) -> dict[str, Any]:
    """The file with a job's steps."""
    return {
        "id": results_id(job.id),
        "object": "file",
        "bytes": size,
        "created_at": int(job.ended_at or job.changed_at),
        "expires_at": None,
        "filename": "step_metrics.csv",
        "purpose": "fine-tune-results",
        "status": "processed",
        "status_details": None,
    }


def model_object(name: str, created: float, owner: str) -> dict[str, Any]:
    """A base or an adapter."""
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner}


def page_object(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of a list."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {
        "object": "list",
        "data": data,
        "has_more": has_more,
        "first_id": first,
        "last_id": last,
    }
