"""Prepares a job: reads all that it starts from, checks that it fits, and fills its adapter."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.config.job import EXPERT_TARGETS, JobSpec, LoraSpec
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.config.sections import plain
from tlora_megatron.layers.adapter_bank import Adapter
from tlora_megatron.layers.slab import AdapterSlab, Copier, initial_factor, split_name
from tlora_megatron.model.backbone import Backbone, over_base, warn_of_expert_rank
from tlora_megatron.training.data.job_data import BatchPlan, JobData, load_job_data
from tlora_megatron.training.data.mapped_tokens import lengths_of, rows_of
from tlora_megatron.training.data.tokenize import fingerprint
from tlora_megatron.training.driven_jobs import NO_DATA, DrivenState, OpenPlan
from tlora_megatron.training.formats.checkpoint import Checkpoint, find_checkpoint
from tlora_megatron.training.formats.peft import AdapterFile, load_adapter
from tlora_megatron.training.formats.peft_config import FUSED_PARTS, hf_targets
from tlora_megatron.training.formats.peft_experts import common_matrix
from tlora_megatron.training.formats.quantised import QuantisationCard, check_same_base
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.preference import Reference

logger = logging.getLogger(__name__)


_SECTIONS = ("optimizer", "schedule")
_OWN = ("max_steps", "epochs", "portion_tokens", "on_nonfinite", "preference")


def fit_to_job(adapter: AdapterFile, job: JobSpec) -> dict[str, Tensor]:
    """Returns the adapter's factors under the job's targets; the job may change only the dropout.

    A job with Megatron targets takes q/k/v (gate/up) factors that share one A, as those exported
    here do; with an A of their own they do not fit into one fused adapter of the same rank. A job
    whose experts share factors takes those that are the same for all of them.

    Raises:
        ValueError: if rank, scaling or targets differ, or factors that are to be one are unequal.
    """
    where, ours, theirs = f"job {job.name!r}: init_from adapter", job.lora, adapter.lora
    wanted = hf_targets(ours.target_modules)
    for target in wanted:
        rank, given = ours.rank_of(target), theirs.rank_of(target)
        if given != rank:
            what = "expert_rank" if target in EXPERT_TARGETS else "rank"
            raise ValueError(
                f"{where}'s {what} must be the job's {rank}, got {given}; an adapter keeps its "
                f"rank: set lora.{what}: {given}, or start without init_from"
            )
    if theirs.num_blocks != ours.num_blocks:
        raise ValueError(
            f"{where}'s num_blocks must be the job's {ours.num_blocks}, got {theirs.num_blocks} "
            f"(1 is a standard adapter)"
        )
    if not math.isclose(theirs.scaling, ours.scaling, rel_tol=1e-6):
        alpha = ours.alpha * theirs.scaling / ours.scaling
        raise ValueError(
            f"{where}'s scaling must be the job's {_scaling_text(ours)}, "
            f"got {_scaling_text(theirs)}; set lora.alpha: {alpha:g}"
        )
    if set(theirs.target_modules) != set(wanted):
        raise ValueError(
            f"{where}'s target_modules must be the job's {', '.join(wanted)}, "
            f"got {', '.join(theirs.target_modules)}"
        )
    num_layers = len(adapter.factors) // (2 * len(wanted))
    factors = {}
    for layer in range(num_layers):
        for target in ours.target_modules:
            joined = _join(adapter.factors, layer, target, where)
            for which, factor in zip(("lora_a", "lora_b"), joined, strict=True):
                name = f"layers.{layer}.{target}.{which}"
                shared = ours.is_shared(target, which)
                factors[name] = common_matrix(factor, f"{where}'s {name}") if shared else factor
    return factors


def shared_by_experts(adapter: AdapterFile, where: str) -> AdapterFile:
    """Returns an adapter whose experts share the outer factors, each of them once.

    Raises:
        ValueError: if it is not on routed experts, or they have unequal ones.
    """
    lora = replace(adapter.lora, expert_sharing="outer")
    if not lora.expert_targets:
        raise ValueError(
            f"adapter {where} must have factors on routed experts, got "
            f"{', '.join(lora.target_modules)}"
        )
    factors = {}
    for name, factor in adapter.factors.items():
        _, target, which = split_name(name)
        shared = lora.is_shared(target, which)
        factors[name] = common_matrix(factor, f"adapter {where}: {name}") if shared else factor
    return replace(adapter, lora=lora, factors=factors)


def _join(
    factors: Mapping[str, Tensor], layer: int, target: str, where: str
) -> tuple[Tensor, Tensor]:
    """A and B of one target of one layer; a fused one's B rows are its parts' in order."""
    parts = FUSED_PARTS.get(target, (target,))
    first = factors[f"layers.{layer}.{parts[0]}.lora_a"]
    for part in parts[1:]:
        if not torch.equal(first, factors[f"layers.{layer}.{part}.lora_a"]):
            raise ValueError(
                f"{where}'s {', '.join(parts)} must share one A to become {target}, "
                f"got an A of its own for {part} in layer {layer}; "
                f"use target_modules: [{', '.join(parts)}]"
            )
    rows = [factors[f"layers.{layer}.{part}.lora_b"] for part in parts]
    return first, torch.cat(rows, dim=-2)


def _scaling_text(lora: LoraSpec) -> str:
    root = "sqrt(rank)" if lora.use_rslora else "rank"
    return f"{lora.scaling:g} (alpha {lora.alpha:g} / {root} {lora.rank})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedJob:
    """A job that can start."""

    spec: JobSpec
    data: JobData
    plan: BatchPlan
    checkpoint: Checkpoint | None
    """To continue from; None = a fresh or imported adapter."""
    imported: Mapping[str, Tensor] | None
    """Whole factors of `init_from`."""
    reference: Reference | None = None
    """Of a job of pairs that goes on, or whose loss has none."""

    @property
    def is_done(self) -> bool:
        """True if its checkpoint has taken all its steps."""
        if self.checkpoint is None or self.spec.driven:
            return False
        return self.checkpoint.step >= self.plan.num_steps

    @property
    def digest(self) -> str:
        """Digest of everything that its steps follow from; paths may differ by node."""
        no_paths = {"data": None, "init_from": None, "resume_from": None}
        step = 0 if self.checkpoint is None else self.checkpoint.step
        prints = [self.data.fingerprint, fingerprint(self.data.eval)]
        content = [asdict(self.spec) | no_paths, *prints, step]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def prepare_job(
    job: JobSpec,
    spec: Backbone,
    tokenizer: Any,
    *,
    base: BaseModelSpec,
    quantisation: QuantisationCard | None = None,
    micro_batch_tokens: int,
    budget: str = "run.micro_batch_tokens",
    saved: Path | None,
    data: JobData | None = None,
    values: bool | None = None,
) -> PreparedJob:
    """Reads everything a job starts from and checks that it fits; tells what it does otherwise.

    Args:
        base: an adapter of another name is warned about.
        quantisation: of the base; an adapter of another one is warned about.
        micro_batch_tokens: rows of the longest sequence that a micro-batch holds.
        budget: what the user calls that, for the sentence.
        saved: this run's checkpoint directory of the job; None = start afresh.
        data: of another process of this node, which has looked at the checkpoint's values, too;
            None = read them with the tokenizer.
        values: look at every value of a checkpoint; None = only where no data are given.
    """
    job = over_base(job, spec)
    for target in job.lora.target_modules:
        try:
            spec.target_shape(target)
        except ValueError as error:
            raise ValueError(f"job {job.name!r}: {error}") from error
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
        _warn_of_other_base(job, adapter, base.name, quantisation)
        imported = fit_to_job(adapter, job)
    plan = OpenPlan() if job.driven else BatchPlan.for_job(job, len(data.train))
    if not job.driven and job.schedule.warmup_steps >= plan.num_steps:
        raise ValueError(
            f"schedule.warmup_steps of job {job.name!r} must be below its {plan.num_steps} steps, "
            f"got {job.schedule.warmup_steps}: the rate would never reach optimizer.lr"
        )
    if not job.driven and job.batch_size > plan.num_sequences:
        logger.warning(
            "job %s: batch_size %d is above its %d training %s (steps: %d, epochs: %.3g)",
            job.name, job.batch_size, plan.num_sequences,
            "sequences" if job.preference is None else "pairs", plan.num_steps, plan.num_epochs,
        )  # fmt: skip
    reference = None
    if job.preference is not None and not job.preference.has_reference:
        reference = Reference.of(data)
    elif job.preference is not None and checkpoint is not None:
        reference = Reference.read(checkpoint.path.parents[1], job, data, plan)
    prepared = PreparedJob(
        spec=job,
        data=data,
        plan=plan,
        checkpoint=checkpoint,
        imported=imported,
        reference=reference,
    )
    if checkpoint is not None:
        check_resumption(prepared)
        where, state = checkpoint.path, checkpoint.state
        check_same_base(job.name, where, state, quantisation, allow_change=base.allow_change)
    return prepared


def start_job(
    prepared: PreparedJob, spec: Backbone, slab: AdapterSlab, copier: Copier | None = None
) -> JobState:
    """Gives a job its adapter: from its checkpoint, an imported one, or a fresh one."""
    job, imported = prepared.spec, prepared.imported
    state = (DrivenState if job.driven else JobState)(
        spec=job,
        data=prepared.data,
        plan=prepared.plan,
        adapter=Adapter(name=job.name, lora=job.lora, slab=slab),
        reference=prepared.reference,
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
    longest = most = job.max_seq_len
    if not job.driven:
        longest = max(int(lengths_of(part).max()) for part in (data.train, data.eval) if part) - 1
        most = max(longest, int(rows_of(data.train, job.num_sides).max()))
    if most > micro_batch_tokens:
        what = "sequence" if job.preference is None else "pair"
        raise ValueError(
            f"{budget} must be at least {most}, the longest {what} of job "
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


def _warn_of_other_base(
    job: JobSpec, adapter: AdapterFile, base_model: str, quantisation: QuantisationCard | None
) -> None:
    """Warns of another base; no error, since a hub name and a folder may hold the same weights."""
    trained_on, codes = adapter.base_model, adapter.quantisation
    if trained_on is not None and Path(trained_on).name != Path(base_model).name:
        logger.warning(
            "job %s: init_from %s was trained on %s and goes on over %s",
            job.name, job.init_from, trained_on, base_model,
        )  # fmt: skip
    if codes is not None and codes != quantisation:
        logger.warning(
            "job %s: init_from %s was trained over %s and goes on over %s",
            job.name, job.init_from, codes, quantisation or "unquantised weights",
        )  # fmt: skip


def _foreign_checkpoint(job: JobSpec, directory: Path) -> Checkpoint:
    for candidate in (directory, directory / "checkpoints"):
        checkpoint = find_checkpoint(candidate)
        if checkpoint is not None:
            return checkpoint
    raise ValueError(
        f"resume_from of job {job.name!r} must be a checkpoint or a jobs/NAME folder with one, "
        f"got {directory}"
    )


def check_resumption(job: PreparedJob) -> None:
    """Tells in one line what a resumed job does otherwise than before.

    What may not change at all (`Checkpoint.check_fits`) is refused earlier.
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
        if name in old and plain(new[name]) != old[name]
    ]


def _settings(job: Mapping[str, Any]) -> dict[str, Any]:
    inner = {f"{s}.{key}": value for s in _SECTIONS for key, value in job[s].items()}
    return {key: job[key] for key in _OWN if key in job} | inner


def _text(value: Any) -> str:
    return "null" if value is None else str(plain(value))
