"""Describes a frozen base model, whoever built it, and what adapters on it may target."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tlora_megatron.config.job import (
    EXPERT_TARGETS,
    FUSED_EXPERT_TARGETS,
    HF_TARGETS,
    SHARED_EXPERT_TARGETS,
    JobSpec,
    LoraSpec,
)
from tlora_megatron.config.rules import either_of, nearest_options
from tlora_megatron.model.spec import GPT_OSS, ExpertsSpec, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """One linear that every layer of a backbone has."""

    target: str
    """Last part of its module name, such as `q_proj`."""
    path: str
    """Its full module name, with `{}` in the place of the layer number."""
    out_size: int
    in_size: int
    kind: Literal["column", "row"] = "column"
    """The dimension that tensor parallelism splits: outputs (column) or inputs (row)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearsSpec:
    """A decoder of equal layers, described by its plain linears."""

    num_layers: int
    vocab_size: int
    max_positions: int
    linears: tuple[LinearShape, ...]
    """Linears in the order of the layer's modules; no target occurs twice."""
    refused: tuple[tuple[str, str], ...] = ()
    """Last parts of module names that cannot be targets, each with the reason."""
    sliding_window: int | None = None
    """The same as `ModelSpec.sliding_window`."""

    def linear(self, target: str) -> LinearShape:
        """The linear that a target names."""
        for linear in self.linears:
            if linear.target == target:
                return linear
        names = ", ".join(self.peft_targets) or "none here"
        reason = dict(self.refused).get(target, "no linear of the backbone's layers has that name")
        raise ValueError(
            f"lora.target_modules must name linears that every layer has ({names}), "
            f"got {target!r}: {reason}"
        )

    def target_shape(self, target: str) -> tuple[int, int]:
        """`(out, in)` of a target's whole weight."""
        linear = self.linear(target)
        return linear.out_size, linear.in_size

    def module_path(self, layer: int, target: str) -> str:
        """Module name of a target in the transformers model."""
        return self.linear(target).path.format(layer)

    @property
    def peft_targets(self) -> tuple[str, ...]:
        """Targets that PEFT can name in this model, in its order."""
        return tuple(linear.target for linear in self.linears)


Backbone = ModelSpec | LinearsSpec
"""Everything that training needs to know about the frozen base model."""


_KNOWN = (*HF_TARGETS, *SHARED_EXPERT_TARGETS, "linear_proj", "linear_fc2")


def check_block_sizes(job: str, lora: LoraSpec, spec: Backbone, tp_size: int = 1) -> None:
    """Refuses numbers of blocks that do not fit the base model or tensor parallelism.

    Raises:
        ValueError: naming the job and the nearest numbers of blocks that fit.
    """
    if not lora.is_block_diagonal:
        return
    _check_kinds(job, lora, spec, tp_size)
    blocks = lora.num_blocks
    widths = {target: _block_width(lora, target, spec) for target in lora.target_modules}
    if blocks in _fitting(lora.rank, widths.values(), tp_size):
        return
    remedy = _remedy(lora, widths.values(), tp_size)
    what = f"lora.num_blocks of job {job!r} must"
    if blocks % tp_size:
        raise ValueError(f"{what} be a multiple of tp_size = {tp_size}, got {blocks}; {remedy}")
    for target, width in widths.items():
        if width % blocks:
            side = "inputs" if lora.block_factor(target) == "lora_a" else "outputs"
            raise ValueError(
                f"{what} divide the {width} {side} of {target}, got {blocks}; {remedy}"
            )
    raise ValueError(f"{what} be at least 2 and divide lora.rank, got {blocks}; {remedy}")


def _fitting(rank: int, widths: Collection[int], tp_size: int) -> list[int]:
    """Numbers of blocks that divide the rank and all widths, and fit tensor parallelism."""
    numbers = range(max(2, tp_size), rank + 1)
    sizes = (rank, *widths)
    return [n for n in numbers if n % tp_size == 0 and not any(size % n for size in sizes)]


def _remedy(lora: LoraSpec, widths: Collection[int], tp_size: int) -> str:
    """Names the nearest numbers of blocks that fit, or the nearest ranks that have one."""
    numbers = _fitting(lora.rank, widths, tp_size)
    if numbers:
        nearest = either_of(nearest_options(lora.num_blocks, numbers))
        return f"the nearest for rank {lora.rank} are {nearest}"
    ranks = [r for r in range(2, 2 * (lora.rank + tp_size)) if _fitting(r, widths, tp_size)]
    nearest = either_of(nearest_options(lora.rank, ranks)) or "standard ones"
    return f"no number does for rank {lora.rank}, the nearest ranks are {nearest}"


def _check_kinds(job: str, lora: LoraSpec, spec: Backbone, tp_size: int) -> None:
    """Refuses targets that tensor parallelism splits differently than the blocks assume."""
    for target in lora.target_modules:
        if target not in _KNOWN:
            raise ValueError(
                f"lora.target_modules of job {job!r} must be among {', '.join(_KNOWN)} with "
                f"parametrization block_diagonal, got {target}: how tensor parallelism would cut "
                f"it is not known; train it as standard"
            )
        kind = "row" if lora.block_factor(target) == "lora_a" else "column"
        if isinstance(spec, LinearsSpec) and tp_size > 1 and spec.linear(target).kind != kind:
            raise ValueError(
                f"lora.parametrization of job {job!r} must be standard on {target}, which is cut "
                f"as {spec.linear(target).kind}-parallel here and not as {kind}-parallel"
            )


def _block_width(lora: LoraSpec, target: str, spec: Backbone) -> int:
    out_size, in_size = spec.target_shape(target)
    return in_size if lora.block_factor(target) == "lora_a" else out_size


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
            f"over a base of model_type {GPT_OSS}, whose experts carry no adapters yet, got "
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
