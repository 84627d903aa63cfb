"""How large an adapter's factors are on one tensor-parallel rank, layer by layer."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.workload import JobLoad

RANK_CHUNK = 16
"""Ranks are stored in multiples of it: `ops.lora.tiling.RANK_CHUNK`."""

LINEAR_TARGETS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "linear_qkv"),
    "linear_proj": ("o_proj", "linear_proj"),
    "linear_fc1": ("gate_proj", "up_proj", "linear_fc1"),
    "linear_fc2": ("down_proj", "linear_fc2"),
}
"""Targets on each Megatron linear, as in `layers.sites`, which needs torch."""
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1")


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
    """Features of all targets of a layer on one rank."""

    cut: int
    """Those that tensor parallelism cuts, over which a block-diagonal factor runs too."""
    inputs: int
    """Those that every rank has, of column-parallel targets."""
    outputs: int
    """The same of row-parallel ones."""


@functools.lru_cache(maxsize=256)
def _features(spec: ModelSpec, targets: tuple[str, ...], tp_size: int) -> _Features:
    cut = inputs = outputs = 0
    for linear, members in LINEAR_TARGETS.items():
        in_size = local_shape(spec, linear, tp_size)[1]
        for target in members:
            if target not in targets:
                continue
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

    Of all ranks together `r (in + out)` and the replicas, or block-diagonal, without replicas,
    `r (in + out / N)` column-parallel and `r (in / N + out)` row-parallel. Under s_lora there are
    no replicas either: column-parallel targets' inputs meet a part of the rank, filled up to the
    same size on every rank, and the whole rank meets a part of row-parallel targets' outputs.
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
    """Elements of its compute copy: whole chunks, and blocks of one rank with zeros around."""
    cut, inputs, outputs = _features(spec, job.targets, tp_size)
    rank = job.local_rank(tp_size)
    if lora_sharding == "s_lora" and job.num_blocks == 1:
        own = -(-rank // tp_size)
        return chunked(rank) * (cut + outputs / tp_size) + chunked(own) * inputs
    return float(chunked(rank) * (cut + inputs + outputs))


def spread_elements(spec: ModelSpec, job: JobLoad, tp_size: int) -> float:
    """Elements of the gradients of several blocks a rank, with what is off the diagonal."""
    if job.num_blocks <= tp_size:
        return 0.0
    return float(job.local_rank(tp_size) * _features(spec, job.targets, tp_size).cut)
