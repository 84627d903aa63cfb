"""From the name of a model to the base and the adapter that it stands for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tlora_megatron.config.jobs import plain
from tlora_megatron.service.api.access.gate import Caller
from tlora_megatron.service.api.errors import ApiError, missing, refused
from tlora_megatron.service.api.native.jobs import own_job
from tlora_megatron.service.api.openai.objects import split_model
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.prepare.submission import base_key
from tlora_megatron.service.sampling.bases import base_of_job
from tlora_megatron.service.store import Job

ADAPTER = "adapter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A base, with an adapter or alone, that is sampled from."""

    name: str
    """The name by which it was asked for."""
    base: str
    """The name by which the sampler knows the base."""
    adapter: Path | None
    """None: the base alone."""
    version: str
    """Tells these weights from all others: `JOB@step-N`, or the base's key."""


def find_model(service: Service, caller: Caller, name: str) -> Model:
    """The model of a name: a base, a fine-tuned model, or the name or id of a job of the caller.

    A checkpoint of a job may be asked while the job trains.

    Raises:
        ApiError: 404 if the caller has none, 400 if it has no adapter yet.
    """
    if (base := service.bases().get(name)) is not None:
        key = base_key(plain(asdict(base)))
        return Model(name=name, base=name, adapter=None, version=key)
    asked = split_model(name)
    try:
        job = own_job(service, asked.job or name, caller.tenant)
    except ApiError:
        raise missing("model", name) from None
    folder = _adapter(service, job) if asked.step is None else _saved(service, job, asked.step)
    step = job.step if asked.step is None else asked.step
    base_name, version = base_of_job(service.home, job.id), f"{job.id}@step-{step}"
    return Model(name=name, base=base_name, adapter=folder, version=version)


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
