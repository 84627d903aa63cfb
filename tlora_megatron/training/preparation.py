"""Reads a job's data and adapter before it starts, and checks that they fit the backbone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tlora_megatron.config.job import JobSpec
from tlora_megatron.layers.adapter_bank import Adapter
from tlora_megatron.layers.slab import AdapterSlab, Copier, initial_factor
from tlora_megatron.model.backbone import Backbone, over_base, warn_of_expert_rank
from tlora_megatron.training.data.job_data import BatchPlan, JobData, load_job_data
from tlora_megatron.training.data.mapped_tokens import lengths_of
from tlora_megatron.training.driven.state import NO_DATA, DrivenState, OpenPlan
from tlora_megatron.training.formats.checkpoint import Checkpoint, find_checkpoint
from tlora_megatron.training.formats.peft import load_adapter
from tlora_megatron.training.formats.peft_fit import fit_to_job
from tlora_megatron.training.formats.quantised import QuantisationCard
from tlora_megatron.training.job_state import JobState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedJob:
    """A job that can start."""

    spec: JobSpec
    data: JobData
    plan: BatchPlan
    checkpoint: Checkpoint | None
    """To continue from; None = a fresh or imported adapter."""
    imported: Mapping[str, torch.Tensor] | None
    """Whole factors of `init_from`."""

    @property
    def is_done(self) -> bool:
        """True if its checkpoint has taken all its steps."""
        if self.checkpoint is None or self.spec.driven:
            return False
        return self.checkpoint.step >= self.plan.num_steps


def prepare_job(
    job: JobSpec,
    spec: Backbone,
    tokenizer: Any,
    *,
    base_model: str,
    quantisation: QuantisationCard | None = None,
    micro_batch_tokens: int,
    budget: str = "run.micro_batch_tokens",
    saved: Path | None,
    data: JobData | None = None,
    values: bool | None = None,
) -> PreparedJob:
    """Reads everything a job starts from and checks that it fits.

    Args:
        base_model: name or path of the base; an adapter of another name is warned about.
        quantisation: of the base; an adapter of another one is warned about.
        micro_batch_tokens: rows of the longest sequence that a micro-batch holds.
        budget: what the user calls that, for the sentence.
        saved: this run's checkpoint directory of the job; None = start afresh.
        data: of another process of this node, which has looked at the checkpoint's values, too;
            None = read them with the tokenizer.
        values: look at every value of a checkpoint; None = only where no data are given.

    Raises:
        ValueError: naming the job.
    """
    job = over_base(job, spec)
    _check_targets(job, spec)
    warn_of_expert_rank(job, spec)
    values = data is None if values is None else values
    if job.driven:
        data = NO_DATA
    data = data or load_job_data(job, tokenizer, spec.vocab_size)
    _check_lengths(job, spec, data, micro_batch_tokens, budget)
    checkpoint = find_checkpoint(saved) if saved is not None else None
    if checkpoint is None and job.resume_from is not None:
        checkpoint = _foreign_checkpoint(job, Path(job.resume_from))
    if checkpoint is not None:
        checkpoint.check_fits(job, data, spec, values=values)
    imported = None
    if checkpoint is None and job.init_from is not None:
        try:
            adapter = load_adapter(Path(job.init_from), model=spec)
        except ValueError as error:
            raise ValueError(f"job {job.name!r}: init_from {error}") from error
        _warn_of_other_base(job, adapter.base_model, base_model)
        _warn_of_other_codes(job, adapter.quantisation, quantisation)
        imported = fit_to_job(adapter, job)
    plan = OpenPlan() if job.driven else BatchPlan.for_job(job, len(data.train))
    if not job.driven and job.schedule.warmup_steps >= plan.num_steps:
        raise ValueError(
            f"schedule.warmup_steps of job {job.name!r} must be below its {plan.num_steps} steps, "
            f"got {job.schedule.warmup_steps}: the rate would never reach optimizer.lr"
        )
    if not job.driven and job.batch_size > len(data.train):
        logger.warning(
            "job %s: batch_size %d is above its %d training sequences (steps: %d, epochs: %.3g)",
            job.name, job.batch_size, len(data.train), plan.num_steps, plan.num_epochs,
        )  # fmt: skip
    return PreparedJob(spec=job, data=data, plan=plan, checkpoint=checkpoint, imported=imported)


def start_job(
    prepared: PreparedJob, spec: Backbone, slab: AdapterSlab, copier: Copier | None = None
) -> JobState:
    """Gives a job its adapter: from its checkpoint, an imported one, or a fresh one.

    Args:
        copier: see `AdapterSlab.load`.
    """
    job, imported = prepared.spec, prepared.imported
    state = (DrivenState if job.driven else JobState)(
        spec=job,
        data=prepared.data,
        plan=prepared.plan,
        adapter=Adapter(name=job.name, lora=job.lora, slab=slab),
    )
    if prepared.checkpoint is not None:
        prepared.checkpoint.restore(state, copier)
    elif imported is not None:
        slab.load(imported.__getitem__, copier=copier)
    else:
        slab.load(lambda name: initial_factor(spec, name, job.lora, job.seed), copier=copier)
    return state


def _check_lengths(
    job: JobSpec, spec: Backbone, data: JobData, micro_batch_tokens: int, budget: str
) -> None:
    longest = job.max_seq_len
    if not job.driven:
        longest = max(int(lengths_of(part).max()) for part in (data.train, data.eval) if part) - 1
    if longest > micro_batch_tokens:
        raise ValueError(
            f"{budget} must be at least {longest}, the longest sequence of job "
            f"{job.name!r}, got {micro_batch_tokens}; raise it or lower the job's max_seq_len"
        )
    if longest > spec.max_positions:
        raise ValueError(
            f"max_seq_len of job {job.name!r} must be at most the model's {spec.max_positions} "
            f"positions, got a sequence of {longest}"
        )
    if spec.sliding_window is not None and longest > spec.sliding_window:
        raise ValueError(
            f"max_seq_len of job {job.name!r} must be at most the model's sliding window "
            f"{spec.sliding_window}, got a sequence of {longest}"
        )


def _warn_of_other_base(job: JobSpec, theirs: str | None, ours: str) -> None:
    """Warns of another base; no error, since a hub name and a folder may hold the same weights."""
    if theirs is not None and Path(theirs).name != Path(ours).name:
        logger.warning(
            "job %s: init_from %s was trained on %s and goes on over %s",
            job.name, job.init_from, theirs, ours,
        )  # fmt: skip


def _warn_of_other_codes(
    job: JobSpec, theirs: QuantisationCard | None, ours: QuantisationCard | None
) -> None:
    if theirs is not None and theirs != ours:
        logger.warning(
            "job %s: init_from %s was trained over %s and goes on over %s",
            job.name, job.init_from, theirs, ours or "unquantised weights",
        )  # fmt: skip


def _check_targets(job: JobSpec, spec: Backbone) -> None:
    for target in job.lora.target_modules:
        try:
            spec.target_shape(target)
        except ValueError as error:
            raise ValueError(f"job {job.name!r}: {error}") from error


def _foreign_checkpoint(job: JobSpec, directory: Path) -> Checkpoint:
    for candidate in (directory, directory / "checkpoints"):
        checkpoint = find_checkpoint(candidate)
        if checkpoint is not None:
            return checkpoint
    raise ValueError(
        f"resume_from of job {job.name!r} must be a checkpoint or a jobs/NAME folder with one, "
        f"got {directory}"
    )
