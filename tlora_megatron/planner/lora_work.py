"""What the adapters on one linear compute and exchange, by LoRA sharding.

Under s_lora the factor that fold replicates is cut too: `lora_a` of column-parallel linears by rank
rows, `lora_b` of row-parallel ones by outputs. Block-diagonal jobs are the same under each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlora_megatron.model import ModelSpec
from tlora_megatron.planner.adapter_sizes import (
    COLUMN_PARALLEL,
    LINEAR_TARGETS,
    chunked,
    local_shape,
    target_width,
)
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.hardware import CollectiveOp
from tlora_megatron.planner.workload import JobLoad

_PLACE_BYTES = 4 + 2 * 2
"""Of a value that is picked out for an exchange or put back: its int32 place, read and written in
bf16 (`ops.rank_places`)."""
_PLACES = 2 + 3 * 2
"""Times that it is, on both ways: picked out twice; copied and put back into two forms, twice."""
PLACES_BYTES = 24
"""Places that are kept of a value, int32: of whole s, and of this rank's part, each to read and in
two forms to write."""


@dataclass(frozen=True, slots=True)
class LoraCounts:
    """What one linear's adapters amount to, by job: see `hardware.LoraCost`."""

    linear: str
    in_size: int
    out_size: int
    gathers: bool
    """Under sequence parallelism x is this rank's rows only."""
    keeps_whole: bool
    """And yet backward reads all of them."""
    rank_columns: tuple[float, ...]
    """Sum of N r over the job's targets here."""
    rank_inputs: tuple[float, ...]
    """K r p."""
    gradients: tuple[float, ...]
    passes: tuple[float, float]
    """Elements a row that are read and written forward and backward because the branch is no part
    of the base's GEMM."""
    exchanged: tuple[float, ...]
    """Values a row of s that ranks exchange."""
    widest: float
    """Columns of the dS that fold sums under sequence parallelism: the widest adapter's."""


class Exchange(NamedTuple):
    """Collectives of s and dS on one linear."""

    forward: tuple[CollectiveOp, ...]
    backward: tuple[CollectiveOp, ...]


def lora_counts(spec: ModelSpec, jobs: Sequence[JobLoad], linear: str, plan: Plan) -> LoraCounts:
    """What the jobs' adapters on a Megatron linear amount to on one tensor-parallel rank."""
    tp_size = plan.tp_size
    out_size, in_size = local_shape(spec, linear, tp_size)
    is_column = linear in COLUMN_PARALLEL
    columns, inputs, gradients, exchanged, widest = [], [], [], [], 0.0
    for job in jobs:
        widths = [
            float(target_width(spec, target, linear, tp_size))
            for target in LINEAR_TARGETS[linear]
            if target in job.targets
        ]
        own = rank = job.local_rank(tp_size)
        if shares_all(plan, job):
            own = -(-rank // tp_size) if is_column else rank
            widths = widths if is_column else [width / tp_size for width in widths]
        columns.append(chunked(rank) * sum(widths))
        inputs.append(float(chunked(own) * in_size * len(widths)))
        gradients.append(sum(own * in_size + rank * width for width in widths))
        standard = job.num_blocks == 1
        exchanged.append(standard * _width(plan, rank) * len(widths))
        widest = max(widest, float(chunked(rank) * len(widths)))
    return LoraCounts(
        linear=linear,
        in_size=in_size,
        out_size=out_size,
        gathers=is_column,
        keeps_whole=is_column and keeps_whole(jobs, linear, plan),
        rank_columns=tuple(columns),
        rank_inputs=tuple(inputs),
        gradients=tuple(gradients),
        passes=_passes(plan, in_size, out_size) if any(exchanged) else (0.0, 0.0),
        exchanged=tuple(exchanged),
        widest=widest,
    )


def shares_all(plan: Plan, job: JobLoad) -> bool:
    """Whether nothing of a standard job's adapter is replicated."""
    return plan.lora_sharding == "s_lora" and plan.tp_size > 1 and job.num_blocks == 1


def keeps_whole(jobs: Sequence[JobLoad], linear: str, plan: Plan) -> bool:
    """Whether a column-parallel linear keeps its gathered input: every rank has rank rows of its
    own of block-diagonal adapters, and under s_lora of all."""
    own = [job for job in jobs if job.num_blocks > 1 or shares_all(plan, job)]
    return any(target in job.targets for job in own for target in LINEAR_TARGETS[linear])


def exchange_of(plan: Plan, counts: LoraCounts) -> Exchange:
    """The collectives of standard adapters' s and dS; see `layers.linear`, `layers.black_box` and
    `layers.rank_sharded`."""
    if plan.tp_size == 1 or not any(counts.exchanged):
        return Exchange((), ())
    if plan.lora_sharding == "s_lora":
        if counts.gathers:
            return Exchange(("all_gather",), ("reduce_scatter",))
        return Exchange(("all_reduce",), ("all_reduce",))
    if plan.lora_sharding == "fold":
        sums = plan.sequence_parallel and counts.gathers and not counts.keeps_whole
        return Exchange((), ("all_reduce",) if sums else ())
    always: tuple[CollectiveOp, ...] = ("all_reduce",)
    under_sp = always if plan.sequence_parallel else ()
    return Exchange(under_sp, always) if counts.gathers else Exchange(always, under_sp)


def place_bytes(plan: Plan) -> float:
    """Moved for each value that s_lora exchanges, forward and backward together."""
    return float(_PLACE_BYTES * _PLACES) if plan.lora_sharding == "s_lora" else 0.0


def _width(plan: Plan, rank: int) -> int:
    """Values a row and target that are exchanged: rank_exchange sums s as it lies, in two forms."""
    return 2 * chunked(rank) if plan.lora_sharding == "rank_exchange" else rank


def _passes(plan: Plan, in_size: int, out_size: int) -> tuple[float, float]:
    """s_lora: the branch is written and read by the base's GEMM, each way. rank_exchange: it is
    written, read beside the base's and their sum written."""
    if plan.tp_size == 1 or plan.lora_sharding == "fold":
        return 0.0, 0.0
    times = 2.0 if plan.lora_sharding == "s_lora" else 4.0
    return times * out_size, times * in_size
