"""Counts what the adapters on one linear compute and exchange under each LoRA sharding.

s_lora also splits the factor that fold replicates: `lora_a` of column-parallel linears by rank
rows, `lora_b` of row-parallel ones by outputs. For block-diagonal jobs all shardings are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.adapter_sizes import (
    ALL_LINEARS,
    COLUMN_PARALLEL,
    chunked,
    local_shape,
    target_width,
)
from tlora_megatron.planner.hardware import CollectiveOp
from tlora_megatron.planner.workload import JobLoad

PLACE_BYTES = 4 + 2 * 2
"""Bytes moved per value that is picked out for an exchange or put back: its int32 position, and a
read and a write in bf16 (`ops.lora.rank_places`)."""
_FORMS = 2
"""Copies of each value in s and dS; each is written separately, padded to whole chunks."""
PLACES_BYTES = 24
"""Bytes of the int32 positions kept per value: for whole s and for this rank's part, one to read
and two to write each."""


@dataclass(frozen=True, slots=True)
class LoraCounts:
    """Counts of the work of one linear's adapters, by job; `hardware.LoraCost` gives their cost."""

    linear: str
    in_size: int
    calls: int
    """Number of kernel calls; block-diagonal jobs beside s_lora's need their own call."""
    read_in: float
    """Elements of x per row that the calls read, in forward and again in backward."""
    read_out: float
    """Elements of dy per row that the calls read, once for dS and once for dB."""
    gathers: bool
    """True if x must be gathered under sequence parallelism, where each rank has its own rows."""
    keeps_whole: bool
    """True if the gathered rows are kept for backward."""
    rank_columns: tuple[float, ...]
    """Sum of N r over each job's targets on this linear."""
    rank_inputs: tuple[float, ...]
    """K r p of each job."""
    gradients: tuple[float, ...]
    passes: tuple[float, float]
    """Elements per row that are read and written, forward and backward, because the branch of the
    adapter is not part of the base linear's GEMM."""
    exchanged: tuple[float, ...]
    """Values of s per row that ranks exchange."""
    placed: tuple[tuple[float, ...], tuple[float, ...]] | None
    """Values per row that are picked out and put back for the exchange, forward and backward; None:
    s is exchanged as it lies, or not at all."""
    widest: float
    """Columns of dS that fold sums under sequence parallelism: those of the widest adapter."""


class Exchange(NamedTuple):
    """The collectives of s and dS on one linear."""

    forward: tuple[CollectiveOp, ...]
    backward: tuple[CollectiveOp, ...]


class _JobCounts(NamedTuple):
    """One job's part in `LoraCounts`."""

    rank_columns: float
    rank_inputs: float
    gradients: float
    exchanged: float
    placed: tuple[float, float]
    widest: float


def lora_counts(spec: ModelSpec, jobs: Sequence[JobLoad], linear: str, plan: Plan) -> LoraCounts:
    """Counts the work of the jobs' adapters on a Megatron linear on one tensor-parallel rank."""
    out_size, in_size = local_shape(spec, linear, plan.tp_size)
    is_column = linear in COLUMN_PARALLEL
    each = [_job_counts(spec, job, linear, plan) for job in jobs]
    here = [job for job in jobs if any(t in job.targets for t in ALL_LINEARS[linear])]
    shared = any(shares_all(plan, job) for job in here)
    # Without s_lora all jobs, block-diagonal or not, go through the same call.
    fused = any(not shares_all(plan, job) for job in here)
    placed = tuple(one.placed[0] for one in each), tuple(one.placed[1] for one in each)
    return LoraCounts(
        linear=linear,
        in_size=in_size,
        calls=shared + fused,
        read_in=float((shared + fused) * in_size),
        read_out=fused * out_size + shared * out_size / (1 if is_column else plan.tp_size),
        gathers=is_column,
        keeps_whole=is_column and keeps_whole(jobs, linear, plan),
        rank_columns=tuple(one.rank_columns for one in each),
        rank_inputs=tuple(one.rank_inputs for one in each),
        gradients=tuple(one.gradients for one in each),
        passes=_passes(plan, here, in_size, out_size),
        exchanged=tuple(one.exchanged for one in each),
        placed=placed if shared else None,
        widest=max((one.widest for one in each), default=0.0),
    )


def _job_counts(spec: ModelSpec, job: JobLoad, linear: str, plan: Plan) -> _JobCounts:
    tp_size, is_column = plan.tp_size, linear in COLUMN_PARALLEL
    in_size = local_shape(spec, linear, tp_size)[1]
    widths = [
        float(target_width(spec, target, linear, tp_size))
        for target in ALL_LINEARS[linear]
        if target in job.targets
    ]
    own = rank = job.local_rank(tp_size)
    placed = 0, 0
    if shares_all(plan, job):
        own = -(-rank // tp_size) if is_column else rank
        widths = widths if is_column else [width / tp_size for width in widths]
        # Picked out forward: of own rows of A, or of a partial sum; backward: of the whole dS.
        placed = own + _FORMS * chunked(rank), rank + _FORMS * chunked(own)
    targets = len(widths)
    return _JobCounts(
        rank_columns=chunked(rank) * sum(widths),
        rank_inputs=float(chunked(own) * in_size * targets),
        gradients=sum(own * in_size + rank * width for width in widths),
        exchanged=float((job.num_blocks == 1) * _width(plan, rank) * targets),
        placed=(float(placed[0] * targets), float(placed[1] * targets)),
        widest=float(chunked(rank) * targets),
    )


def shares_all(plan: Plan, job: JobLoad) -> bool:
    """True if no part of a standard job's adapter is replicated."""
    return plan.lora_sharding == "s_lora" and plan.tp_size > 1 and job.num_blocks == 1


def keeps_whole(jobs: Sequence[JobLoad], linear: str, plan: Plan) -> bool:
    """True if a column-parallel linear keeps its gathered input for backward.

    Every rank has rank rows of its own: of block-diagonal adapters, and under s_lora of all.
    """
    own = [job for job in jobs if job.num_blocks > 1 or shares_all(plan, job)]
    return any(target in job.targets for job in own for target in ALL_LINEARS[linear])


def exchange_of(plan: Plan, counts: LoraCounts) -> Exchange:
    """The collectives of standard adapters' s and dS, as the package `layers` makes them."""
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


def _width(plan: Plan, rank: int) -> int:
    """Values exchanged per row and target; rank_exchange sums s as it lies, in two forms."""
    return _FORMS * chunked(rank) if plan.lora_sharding == "rank_exchange" else rank


def _passes(
    plan: Plan, here: Sequence[JobLoad], in_size: int, out_size: int
) -> tuple[float, float]:
    """Elements per row of separate passes over a branch, forward and backward.

    Forward, the base's output is read and the sum is written. Backward, the branch is written, read
    beside the base's dx, and their sum is written. rank_exchange does this for standard jobs, and
    s_lora if block-diagonal jobs are in the base's GEMM.
    """
    standard = [job.num_blocks == 1 for job in here]
    beside = any(standard) if plan.lora_sharding == "rank_exchange" else len(set(standard)) > 1
    if plan.tp_size == 1 or plan.lora_sharding == "fold" or not beside:
        return 0.0, 0.0
    return 2.0 * out_size, 4.0 * in_size
