"""Compares a job that goes on from a checkpoint with what it was when that was written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tlora_megatron.config.job import JobSpec
from tlora_megatron.training.formats.checkpoint import Checkpoint
from tlora_megatron.training.preparation import PreparedJob

logger = logging.getLogger(__name__)

_SECTIONS = ("optimizer", "schedule")
_OWN = ("max_steps", "epochs", "portion_tokens", "on_nonfinite")


def check_resumption(job: PreparedJob) -> None:
    """Tells in one line what a resumed job does otherwise than before.

    What may not change at all (`Checkpoint.check_fits`) is refused earlier.

    Raises:
        ValueError: if the job has done more steps than it is to do.
    """
    checkpoint, spec = job.checkpoint, job.spec
    if checkpoint is None or spec.driven:
        return
    done, steps = checkpoint.step, job.plan.num_steps
    if done > steps:
        asked = f"epochs {spec.epochs}, which are {steps} steps" if spec.epochs else str(steps)
        raise ValueError(
            f"{'epochs' if spec.epochs else 'max_steps'} of job {spec.name!r} must be at least the "
            f"{done} steps that its checkpoint {checkpoint.path} has done, got {asked}; to train "
            f"it anew give another run.output_dir and no resume_from"
        )
    _tell_of_other_starts(checkpoint, spec)
    if changes := changed_settings(checkpoint.state["job"], spec):
        what = (
            "goes on from step %d with other settings"
            if done < steps
            else "has done its %d steps; other settings than theirs have no effect"
        )
        logger.warning(f"job %s {what}: %s", spec.name, done, ", ".join(changes))


def _tell_of_other_starts(checkpoint: Checkpoint, job: JobSpec) -> None:
    """Tells of a start that the job's own checkpoint overrules, and that it did not begin with."""
    for key in ("init_from", "resume_from"):
        given = getattr(job, key)
        is_source = key == "resume_from" and given and checkpoint.path.is_relative_to(given)
        if given and not is_source and given != checkpoint.state["job"].get(key):
            logger.warning(
                "%s %s of job %s has no effect: it goes on from its checkpoint %s; to begin with "
                "it give another run.output_dir",
                key, given, job.name, checkpoint.path,
            )  # fmt: skip


def changed_settings(saved: Mapping[str, Any], job: JobSpec) -> list[str]:
    """Names the settings of a job's end, portions, optimizer and schedule that differ, by values.

    Args:
        saved: the job's values in the checkpoint; those of older versions may lack some.
    """
    old, new = _settings(saved), _settings(asdict(job))
    return [
        f"{name} {_text(new[name])} instead of {_text(old[name])}"
        for name in new
        if name in old and _plain(new[name]) != old[name]
    ]


def _settings(job: Mapping[str, Any]) -> dict[str, Any]:
    inner = {f"{s}.{key}": value for s in _SECTIONS for key, value in job[s].items()}
    return {key: job[key] for key in _OWN if key in job} | inner


def _plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    return "null" if value is None else str(_plain(value))
