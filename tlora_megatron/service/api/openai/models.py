"""Models by their names: bases, and adapters that jobs have trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tlora_megatron.config.sections import plain
from tlora_megatron.service.api.gate import ApiError, Caller, missing, refused
from tlora_megatron.service.api.native.jobs import own_job
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.prepare.submission import base_key
from tlora_megatron.service.settings import base_of_job, template_of_job
from tlora_megatron.service.store import Job

_JOB = r"j\d+[a-z]{4}"
_ADAPTER = re.compile(rf"ft:.*:(?P<job>{_JOB})(?::ckpt-step-(?P<step>\d{{1,12}}))?", re.DOTALL)
ADAPTER = "adapter"


class ModelName(NamedTuple):
    """The parts of a model's name; None: it is no adapter's, or no checkpoint's."""

    job: str | None
    step: int | None


def split_model(name: str) -> ModelName:
    """Reads the name of a model; nothing looks whether there is one."""
    found = _ADAPTER.fullmatch(name)
    job, step = (None, None) if found is None else found.group("job", "step")
    return ModelName(job, None if step is None else int(step))


def adapter_name(base: str, tenant: str, suffix: str | None, job: str) -> str:
    """The model that a job trains: `ft:BASE:TENANT:SUFFIX:JOB`."""
    return f"ft:{base}:{tenant}:{suffix or ''}:{job}"


def model_of(job: Job, asked: Mapping[str, Any]) -> str:
    """The name of the model that a job trains: of its base, also where it continues another one."""
    base = asked.get("base", asked["model"])
    return adapter_name(base, job.tenant, asked["suffix"], job.id)


def no_model(name: str) -> ApiError:
    """The error for a model that is not there, or is another tenant's."""
    error = missing("model", name)
    error.code = "model_not_found"
    return error


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A base, with an adapter or alone, that is sampled from."""

    name: str
    """The name by which it was asked for."""
    base: str
    """The name by which the sampler knows the base."""
    adapter: Path | None
    """None: the base alone."""
    template: str | None
    """Chat template that the job has learnt by; None: the base's."""
    version: str
    """Tells these weights from all others: `JOB@step-N`, or the base's key."""


def find_model(service: Service, caller: Caller, name: str) -> Model:
    """The model of a name: a base, a fine-tuned model, or the name or id of a job of the caller.

    A checkpoint of a job may be asked while the job trains. Raises `ApiError` if there is none.
    """
    if (base := service.bases().get(name)) is not None:
        key = base_key(plain(base))
        return Model(name=name, base=name, adapter=None, template=None, version=key)
    asked = split_model(name)
    try:
        job = own_job(service, asked.job or name, caller.tenant)
    except ApiError:
        raise no_model(name) from None
    folder = _adapter(service, job) if asked.step is None else _saved(service, job, asked.step)
    step = job.step if asked.step is None else asked.step
    return Model(
        name=name,
        base=base_of_job(service.home, job.id),
        adapter=folder,
        template=template_of_job(service.home, job.id),
        version=f"{job.id}@step-{step}",
    )


def _saved(service: Service, job: Job, step: int) -> Path:
    folder = service.home.job(job.id) / "checkpoints" / f"step_{step:08d}"
    if not folder.is_dir():
        rule = "be of a checkpoint that is there (the two newest are kept)"
        raise refused("model", rule, f"step {step} of {job.name}", status=404)
    return folder


def _adapter(service: Service, job: Job) -> Path:
    folder = service.home.job(job.id) / ADAPTER
    if job.state != "finished" or not folder.is_dir():
        raise ApiError(
            400,
            f"model must be of a job that has finished, got {job.name!r}, which is {job.state} at "
            f"step {job.step}",
            param="model",
        )
    return folder
