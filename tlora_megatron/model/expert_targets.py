"""The targets of a job's adapter over a base with routed experts, and what they may be."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from tlora_megatron.config.job import (
    EXPERT_TARGETS,
    FUSED_EXPERT_TARGETS,
    JobSpec,
    LoraSpec,
)
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.model.experts import ExpertsSpec
from tlora_megatron.model.gpt_oss import MODEL_TYPE
from tlora_megatron.model.spec import ModelSpec

logger = logging.getLogger(__name__)

_OF_EXPERTS = {
    target.removeprefix("experts."): target for target in EXPERT_TARGETS + FUSED_EXPERT_TARGETS
}
_PARTS = dict(zip(FUSED_EXPERT_TARGETS, (EXPERT_TARGETS[:2], EXPERT_TARGETS[2:]), strict=True))
"""What a fused target holds."""
_MOST_BYTES = 18
"""Of an element in a bf16 run: fp32 master, gradient and two moments, and the compute copy."""


def over_base(job: JobSpec, spec: Backbone) -> JobSpec:
    """Returns a job whose targets have the names of the base's linears.

    Over a base with routed experts the MLP's targets are theirs: `gate_proj` becomes
    `experts.gate_proj`.

    Raises:
        ValueError: naming the job, for adapters that routed experts cannot have.
    """
    experts = _experts_of(spec)
    if experts is not None:
        targets = on_experts(job.lora.target_modules)
        job = replace(job, lora=replace(job.lora, target_modules=targets))
    if isinstance(spec, ModelSpec) and spec.gpt_oss is not None and job.lora.expert_targets:
        raise ValueError(
            f"lora.target_modules of job {job.name!r} must be among {', '.join(spec.peft_targets)} "
            f"over a base of model_type {MODEL_TYPE}, whose experts carry no adapters yet, got "
            f"{job.lora.expert_targets[0].removeprefix('experts.')}"
        )
    _check(job)
    if job.lora.expert_targets and isinstance(spec, ModelSpec) and spec.shared_ffn_size is not None:
        raise ValueError(
            f"lora.target_modules of job {job.name!r} must not name routed experts over a base "
            f"with shared experts, where PEFT does not load them, got {job.lora.expert_targets[0]}"
        )
    return job


def on_experts(targets: Iterable[str]) -> tuple[str, ...]:
    """Returns targets with the names that they have where every MLP is routed experts."""
    return tuple(_OF_EXPERTS.get(target, target) for target in targets)


def expert_state_bytes(lora: LoraSpec, spec: Backbone) -> int:
    """Returns the bytes of an adapter's state on all routed experts of a base, in a bf16 run."""
    experts = _experts_of(spec)
    if experts is None:
        return 0
    elements = 0
    for target in lora.expert_targets:
        for which, size in zip(("lora_b", "lora_a"), spec.target_shape(target), strict=True):
            copies = 1 if lora.is_shared(target, which) else experts.num_experts
            elements += copies * lora.rank_of(target) * size
    return _MOST_BYTES * spec.num_layers * elements


def warn_of_expert_rank(job: JobSpec, spec: Backbone) -> None:
    """Says what a job's adapters on routed experts take if nobody has chosen their rank."""
    lora = job.lora
    if not lora.expert_targets or lora.expert_rank is not None:
        return
    logger.warning(
        "job %s: lora.expert_rank is not given: adapters on routed experts have rank %d, and their "
        "state takes %.3g GB over all ranks of a replica",
        job.name, lora.rank, expert_state_bytes(lora, spec) / 1e9,
    )  # fmt: skip


def _experts_of(spec: Backbone) -> ExpertsSpec | None:
    return spec.experts if isinstance(spec, ModelSpec) else None


def _check(job: JobSpec) -> None:
    lora, where = job.lora, f"of job {job.name!r}"
    targets = lora.expert_targets
    if not targets:
        if lora.expert_rank is not None:
            raise ValueError(
                f"lora.expert_rank {where} must be absent without targets on routed experts, got "
                f"{lora.expert_rank}"
            )
        if lora.expert_sharing != "none":
            raise ValueError(
                f"lora.expert_sharing {where} must be none without targets on routed experts, got "
                f"{lora.expert_sharing}"
            )
        return
    if lora.dropout > 0:
        raise ValueError(
            f"lora.dropout {where} must be 0 with targets on routed experts, as in PEFT, got "
            f"{lora.dropout:g}"
        )
    if lora.is_block_diagonal:
        raise ValueError(
            f"lora.parametrization {where} must be standard with targets on routed experts, got "
            f"{lora.parametrization}"
        )
    held = {part for target in targets for part in _PARTS.get(target, (target,))}
    if len(held) < len(EXPERT_TARGETS) and held != {EXPERT_TARGETS[-1]}:
        raise ValueError(
            f"lora.target_modules {where} must name gate_proj, up_proj and down_proj of routed "
            f"experts, or down_proj alone: PEFT loads no other adapter rightly, got "
            f"{', '.join(targets)}"
        )
