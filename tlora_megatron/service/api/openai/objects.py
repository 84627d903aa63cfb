"""A service's rows as the objects of the API, with the files of results."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from tlora_megatron.service.api.openai.models import model_of
from tlora_megatron.service.history import Told
from tlora_megatron.service.store import Job, JobState, Upload

RESULTS = "file-results-"


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
    """A job, with what was remembered of the request that made it."""
    is_over, numbers = job.state.is_over, asked["hyperparameters"]
    method = "dpo" if "beta" in numbers else "supervised"
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
        "result_files": [RESULTS + job.id] if is_over and job.step else [],
        "seed": asked["seed"],
        "hyperparameters": numbers,
        "method": {"type": method, method: {"hyperparameters": numbers}},
        "metadata": asked["metadata"],
        "integrations": [],
        "trained_tokens": job.tokens if is_over else None,
        "user_provided_suffix": asked["suffix"],
        "error": _error(job),
    }


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
    found = _file(upload.id, upload.size, upload.created_at, upload.name, upload.purpose)
    return {**found, "sha256": upload.digest}


def results_object(job: Job, size: int) -> dict[str, Any]:
    at = job.ended_at or job.changed_at
    return _file(RESULTS + job.id, size, at, "step_metrics.csv", "fine-tune-results")


def _file(id: str, size: int, created: float, name: str, purpose: str) -> dict[str, Any]:
    return {
        "id": id,
        "object": "file",
        "bytes": size,
        "created_at": int(created),
        "expires_at": None,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def model_object(name: str, created: float, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner}


def page_object(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {
        "object": "list",
        "data": data,
        "has_more": has_more,
        "first_id": first,
        "last_id": last,
    }


COLUMNS = (
    *("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"),
    *("learning_rate", "grad_norm", "tokens", "valid_exact_match"),
)
"""The first five are the API's; accuracies of single tokens are not measured and stay empty."""
_FROM_STEP = {
    "train_loss": "loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "tokens": "tokens",
}
_FROM_EVALUATION = {"valid_loss": "eval_loss", "valid_exact_match": "eval_exact_match"}


def results_csv(told: Sequence[Told]) -> bytes:
    """A line for each step, with the evaluation after it where there was one."""
    lines: dict[int, dict[str, Any]] = {}
    for _, row in told:
        if row["kind"] != "event":
            names = _FROM_STEP if row["kind"] == "step" else _FROM_EVALUATION
            line = lines.setdefault(row["step"], {"step": row["step"]})
            line |= {to: row.get(name) for to, name in names.items()}
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines[step] for step in sorted(lines))
    return text.getvalue().encode()
