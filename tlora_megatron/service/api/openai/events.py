"""The history of a job as events and checkpoints of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tlora_megatron.service.api.openai.names import checkpoint_name
from tlora_megatron.service.history import Mark, Row

_STATES: Mapping[str, str] = {
    "queued": "Files validated, the job waits for its turn",
    "running": "Fine-tuning job started",
    "paused": "Fine-tuning job paused",
    "finished": "The job has successfully completed",
    "cancelled": "Fine-tuning job cancelled",
}
_BACK = "The job waits for its turn, to go on where it was saved"


def event_object(mark: Mark, row: Row, job: str) -> dict[str, Any] | None:
    """An event; None if it is nothing that a client asks for.

    Args:
        mark: Names the row in the job's history.
        row: As its reader may see it.
        job: Its id.
    """
    event = _event(row)
    if event is None:
        return None
    return {
        "id": f"{_prefix(job)}{mark}",
        "object": "fine_tuning.job.event",
        "created_at": int(row["at"]),
        "level": "info",
        "type": "message",
        "data": None,
        **event,
    }


def mark_of(event_id: str, job: str) -> Mark | None:
    """The row of a job's history that an event was made of; None: no event is called so."""
    prefix = _prefix(job)
    return Mark.read(event_id.removeprefix(prefix)) if event_id.startswith(prefix) else None


def _prefix(job: str) -> str:
    return f"ftevent-{job}-"


def checkpoint_object(
    step: int, at: float, measured: Sequence[Row], job: str, model: str
) -> dict[str, Any]:
    """A checkpoint with what was measured at its step.

    Args:
        at: when it was written.
        measured: steps and evaluations.
        job: its id.
        model: name of the adapter.
    """
    metrics: dict[str, Any] = {"step": step}
    for row in measured:
        if row["kind"] == "step":
            metrics["train_loss"] = row.get("loss")
        else:
            metrics["full_valid_loss"] = row["eval_loss"]
    return {
        "id": checkpoint_id(job, step),
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(at),
        "fine_tuned_model_checkpoint": checkpoint_name(model, step),
        "fine_tuning_job_id": job,
        "step_number": step,
        "metrics": metrics,
    }


def checkpoint_id(job: str, step: int) -> str:
    """The id of a checkpoint."""
    return f"ftckpt-{job}-{step}"


def _event(row: Row) -> dict[str, Any] | None:
    """Message, level, type and data of a row; None: nothing that a client asks for."""
    if row["kind"] == "step":
        loss = row.get("loss")
        shown = "none" if loss is None else f"{loss:.4f}"
        message = f"Step {row['step']}: training loss={shown}"
        names = {"loss": "train_loss", "lr": "learning_rate", "tokens": "tokens"}
        return _metrics(message, row, names)
    if row["kind"] == "evaluation":
        message = f"Step {row['step']}: full validation loss={row['eval_loss']:.4f}"
        names = {"eval_loss": "full_valid_loss", "eval_exact_match": "full_valid_exact_match"}
        return _metrics(message, row, names)
    words = _message(row)
    return None if words is None else {"message": words, "level": _level(row)}


def _metrics(message: str, row: Row, names: Mapping[str, str]) -> dict[str, Any]:
    data = {"step": row["step"]}
    data |= {to: row[name] for name, to in names.items() if row.get(name) is not None}
    return {"message": message, "type": "metrics", "data": data}


def _message(row: Row) -> str | None:
    kind, to = row["event"], str(row.get("to", ""))
    if kind == "submitted":
        return "Created fine-tuning job"
    if kind == "state" and to == "failed":
        return f"The job failed: {row.get('why') or 'the service says no more'}"
    if kind == "state" and to == "queued" and row.get("from") != "validating":
        return _BACK
    if kind == "state":
        return _STATES.get(to)
    if kind == "wished":
        return f"Asked to {row['wish']}"
    if kind == "saved":
        return f"Checkpoint created at step {row['step']}"
    if kind == "said" and row.get("what") == "note":
        return str(row.get("message"))
    return None


def _level(row: Row) -> str:
    if row["event"] == "state" and row.get("to") == "failed":
        return "error"
    return "warn" if row["event"] == "said" else "info"
