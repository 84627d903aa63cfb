"""Sizes of adapters in one layer on one rank, and what those on a linear compute and exchange.

The LoRA sharding s_lora also splits the factor that fold replicates: `lora_a` of column-parallel
linears by rank rows, `lora_b` of row-parallel ones by outputs. For block-diagonal jobs all
shardings are the same.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.model.spec import ALL_LINEARS, COLUMN_PARALLEL, SHARED_EXPERT_LINEARS, ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.hardware import CollectiveOp
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad

_Row = tuple[float, ...]


class JobSums:
    """Computes each sum once; tuples are kept and known by identity, which is fast."""

    def __init__(self) -> None:
        self._dots: dict[tuple[int, int], tuple[float, _Row, _Row]] = {}
        self._parts: dict[tuple[int, float], tuple[list[float], _Row]] = {}
        self._any: dict[int, tuple[float, _Row]] = {}
        self._present: dict[tuple[int, float, int], tuple[float, _Row, _Row]] = {}

    def dot(self, load: _Row, values: _Row) -> float:
        """The sum of products, by job."""
        key = id(load), id(values)
        found = self._dots.get(key)
        if found is None:
            found = self._dots[key] = _dot(load, values), load, values
        return found[0]

    def mean(self, load: RoundLoad, values: _Row) -> float:
        """The mean over a round's rows of a value that each job has."""
        return self.dot(load.job_tokens, values) / max(load.tokens, 1e-9)

    def present(self, sequences: _Row, bins: float, values: _Row) -> float:
        """The sum of jobs' values in the mean of `bins` micro-batches of a round."""
        key = id(sequences), bins, id(values)
        found = self._present.get(key)
        if found is None:
            shares = id(sequences), bins  # of micro-batches in which each job is
            if shares not in self._parts:
                self._parts[shares] = [min(1.0, n / bins) for n in sequences], sequences
            total = _dot(self._parts[shares][0], values)
            found = self._present[key] = total, sequences, values
        return found[0]

    def any_of(self, shares: _Row) -> float:
        """The share of rounds in which something happens to some job.

        Jobs of the same share have it in the same rounds, as their batches begin together; others
        do not.
        """
        found = self._any.get(id(shares))
        if found is None:
            never = math.prod(1 - min(1.0, share) for share in {round(s, 3) for s in shares})
            found = self._any[id(shares)] = 1 - never, shares
        return found[0]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    assert len(a) == len(b), "both have a value for every job"
    total: float = sum(map(operator.mul, a, b))
    return total


RANK_CHUNK = 16
"""Ranks are stored in multiples of this number, `ops.lora.tiling.RANK_CHUNK`."""

_ATTENTION = ("linear_qkv", "linear_proj")


def dense_linears(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Linears of a layer that all rows meet, by block; of an MLP with experts the shared one's."""
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
    # rank_exchange sums s as it lies, in two forms.
    width = _FORMS * chunked(rank) if plan.lora_sharding == "rank_exchange" else rank
    return _JobCounts(
        rank_columns=chunked(rank) * sum(widths),
        rank_inputs=float(chunked(own) * in_size * targets),
        gradients=sum(own * in_size + rank * width for width in widths),
        exchanged=float((job.num_blocks == 1) * width * targets),
        placed=(float(placed[0] * targets), float(placed[1] * targets)),
        widest=float(chunked(rank) * targets),
    )


def shares_all(plan: Plan, job: JobLoad) -> bool:
    """True if no part of a standard job's adapter is replicated."""
    return plan.lora_sharding == "s_lora" and plan.tp_size > 1 and job.num_blocks == 1


def keeps_whole(jobs: Sequence[JobLoad], linear: str, plan: Plan) -> bool:
    """True if a column-parallel linear keeps its input: ranks have rank rows of their own."""
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
