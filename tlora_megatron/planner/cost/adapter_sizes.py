"""Sizes of an adapter's factors in one layer on one tensor-parallel rank."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.workload import JobLoad

RANK_CHUNK = 16
"""Ranks are stored in multiples of this number, `ops.lora.tiling.RANK_CHUNK`."""

LINEAR_TARGETS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "linear_qkv"),
    "linear_proj": ("o_proj", "linear_proj"),
    "linear_fc1": ("gate_proj", "up_proj", "linear_fc1"),
    "linear_fc2": ("down_proj", "linear_fc2"),
}
"""Targets on each Megatron linear; a copy of `layers.sites`, which needs torch."""
SHARED_EXPERT_LINEARS: dict[str, tuple[str, ...]] = {
    "shared_fc1": ("shared_expert.gate_proj", "shared_expert.up_proj"),
    "shared_fc2": ("shared_expert.down_proj",),
}
"""Those on the linears of a shared expert, in models that have one; likewise a copy."""
ALL_LINEARS = LINEAR_TARGETS | SHARED_EXPERT_LINEARS
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1", "shared_fc1")
_ATTENTION = ("linear_qkv", "linear_proj")


def dense_linears(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Linears of a layer that all rows meet, by block.

    Routed experts stand in the place of the MLP's; where there is a shared expert, it has some.
    """
    if spec.experts is None:
        return {"attention": _ATTENTION, "mlp": ("linear_fc1", "linear_fc2")}
    shared = () if spec.shared_ffn_size is None else tuple(SHARED_EXPERT_LINEARS)
    return {"attention": _ATTENTION, "mlp": shared}


def chunked(rank: int) -> int:
    """A rank as it is stored and multiplied."""
    return -(-rank // RANK_CHUNK) * RANK_CHUNK


def local_shape(spec: ModelSpec, linear: str, tp_size: int) -> tuple[int, int]:
    """`(out, in)` of a Megatron linear on one tensor-parallel rank."""
    out_size, in_size = spec.target_shape(linear)
    if linear in COLUMN_PARALLEL:
        return out_size // tp_size, in_size
    return out_size, in_size // tp_size


def target_width(spec: ModelSpec, target: str, linear: str, tp_size: int) -> int:
    """Output features of a target on one tensor-parallel rank."""
    out_size = spec.target_shape(target)[0]
    return out_size // tp_size if linear in COLUMN_PARALLEL else out_size


class _Features(NamedTuple):
    """Sums of features over all targets of a layer on one rank."""

    cut: int
    """Features that tensor parallelism splits; a block-diagonal factor is split with them."""
    inputs: int
    """Features of column-parallel targets that every rank holds whole."""
    outputs: int
    """Features of row-parallel targets that every rank holds whole."""


@functools.lru_cache(maxsize=256)
def _features(spec: ModelSpec, targets: tuple[str, ...], tp_size: int) -> _Features:
    cut = inputs = outputs = 0
    for linear, members in ALL_LINEARS.items():
        for target in members:
            if target not in targets:
                continue
            in_size = local_shape(spec, linear, tp_size)[1]
            width = target_width(spec, target, linear, tp_size)
            is_column = linear in COLUMN_PARALLEL
            cut += width if is_column else in_size
            inputs += in_size if is_column else 0
            outputs += 0 if is_column else width
    return _Features(cut, inputs, outputs)


def adapter_elements(
    spec: ModelSpec,
    job: JobLoad,
    tp_size: int,
    lora_sharding: LoraSharding = "fold",
    *,
    replicated_only: bool = False,
) -> float:
    """Elements of a job's adapter in one layer on one tensor-parallel rank.

    All ranks together hold `r (in + out)` and the replicas. A block-diagonal adapter has no
    replicas: `r (in + out / N)` for column-parallel and `r (in / N + out)` for row-parallel
    targets. s_lora has no replicas either: column-parallel inputs meet a part of the rank, padded
    to equal size, and the whole rank meets a part of row-parallel outputs.
    """
    cut, inputs, outputs = _features(spec, job.targets, tp_size)
    whole = inputs + outputs
    if job.num_blocks > 1:
        return 0.0 if replicated_only else job.rank * (cut / job.num_blocks + whole / tp_size)
    if replicated_only:
        replicates = tp_size > 1 and lora_sharding != "s_lora"
        return float(job.rank * whole) if replicates else 0.0
    if lora_sharding == "s_lora":
        return job.rank * (cut + outputs / tp_size) + -(-job.rank // tp_size) * inputs
    return float(job.rank * (cut + whole))


def copied_elements(
    spec: ModelSpec, job: JobLoad, tp_size: int, lora_sharding: LoraSharding = "fold"
) -> float:
    """Elements of the compute copy: ranks in whole chunks, blocks with the zeros between them."""
    cut, inputs, outputs = _features(spec, job.targets, tp_size)
    rank = job.local_rank(tp_size)
    if lora_sharding == "s_lora" and job.num_blocks == 1:
        own = -(-rank // tp_size)
        return chunked(rank) * (cut + outputs / tp_size) + chunked(own) * inputs
    return float(chunked(rank) * (cut + inputs + outputs))


def spread_elements(spec: ModelSpec, job: JobLoad, tp_size: int) -> float:
    """Elements of the gradients if a rank has several blocks, off-diagonal zeros included."""
    if job.num_blocks <= tp_size:
        return 0.0
    return float(job.local_rank(tp_size) * _features(spec, job.targets, tp_size).cut)
