"""Names of models: a base, the adapter that a job trains, and a checkpoint of it."""

from __future__ import annotations

import re
from typing import NamedTuple

_JOB = r"j\d+[a-z]{4}"
_ADAPTER = re.compile(rf"ft:.*:(?P<job>{_JOB})(?::ckpt-step-(?P<step>\d{{1,12}}))?", re.DOTALL)
_RESULTS = re.compile(rf"file-results-(?P<job>{_JOB})")


class ModelName(NamedTuple):
    """The parts of a model's name."""

    base: str | None
    """Name of a base, where it is no adapter's."""
    job: str | None
    """Id of the job that trains the adapter."""
    step: int | None
    """Step of a checkpoint."""


def split_model(name: str) -> ModelName:
    """Reads the name of a model; nothing looks whether there is one."""
    found = _ADAPTER.fullmatch(name)
    if found is None:
        return ModelName(name, None, None)
    step = found["step"]
    return ModelName(None, found["job"], None if step is None else int(step))


def adapter_name(base: str, tenant: str, suffix: str | None, job: str) -> str:
    """The model that a job trains: `ft:BASE:TENANT:SUFFIX:JOB`."""
    return f"ft:{base}:{tenant}:{suffix or ''}:{job}"


def checkpoint_name(adapter: str, step: int) -> str:
    """The model as it was after a step."""
    return f"{adapter}:ckpt-step-{step}"


def results_id(job: str) -> str:
    """Id of the file with a job's steps."""
    return f"file-results-{job}"


def job_of_results(file: str) -> str | None:
    """The job of such a file; None: another file's id."""
    found = _RESULTS.fullmatch(file)
    return None if found is None else found["job"]
