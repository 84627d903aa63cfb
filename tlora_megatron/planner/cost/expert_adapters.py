"""Sizes of adapters on routed experts, and the bytes that experts keep and work in.

Coefficients of products are those of adapters on dense linears. Counted in bytes is what kernels
read and write for each row of a context-parallel rank: of every factor that meets a row the copy is
read in both directions, and its gradient is read and written.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tlora_megatron.model.spec import EXPERT_LINEARS, ModelSpec
from tlora_megatron.planner.cost.adapter_sizes import JobSums, chunked
from tlora_megatron.planner.cost.experts import ExpertSplit
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad

_FP32 = 4
ARENA_RANKS = 8
"""Rank columns that an adapter's are filled up to, `layers.arenas.RANK_ALIGNMENT`."""


class ExpertElements(NamedTuple):
    """Elements of one adapter in a layer on a rank."""

    own: int = 0
    """Of the rank's experts."""
    replicated: int = 0
    """Those of them that every rank has that cuts an expert."""
    shared: int = 0
    """Of factors that all experts share, whole on every rank."""

    @property
    def total(self) -> int:
        return self.own + self.shared


class _Sizes(NamedTuple):
    """One target of one adapter."""

    linear: str
    rank: int
    cut: int
    """Features on the side that tensor parallelism cuts: those inside an expert."""
    whole: int
    """Hidden features of the base."""


def adapts_experts(job: JobLoad) -> bool:
    """True if a job has targets on routed experts."""
    return any(target in own for own in EXPERT_LINEARS.values() for target in job.targets)


@functools.lru_cache(maxsize=4096)
def _sizes(
    spec: ModelSpec, targets: tuple[str, ...], rank: int, expert_tp: int
) -> tuple[_Sizes, ...]:
    found = []
    for linear, members in EXPERT_LINEARS.items():
        for target in members:
            if target in targets:
                out_size, in_size = spec.target_shape(target)
                cut, whole = (out_size, in_size) if linear == "experts_fc1" else (in_size, out_size)
                found.append(_Sizes(linear, rank, cut // expert_tp, whole))
    return tuple(found)


def _targets(spec: ModelSpec, job: JobLoad, split: ExpertSplit) -> Iterator[_Sizes]:
    yield from _sizes(spec, job.targets, job.expert_rank or job.rank, split.expert_tp)


def expert_elements(spec: ModelSpec, job: JobLoad, split: ExpertSplit | None) -> ExpertElements:
    """Returns the elements of a job's adapter on routed experts; none over a dense base."""
    if split is None:
        return ExpertElements()
    own = replicated = shared = 0
    for target in _targets(spec, job, split):
        count = split.num_local * target.rank
        own += count * target.cut
        if job.shares_outer:
            shared += target.rank * target.whole
        else:
            own += count * target.whole
            replicated += (split.expert_tp > 1) * count * target.whole
    return ExpertElements(own, replicated, shared)


def arena_columns(spec: ModelSpec, job: JobLoad, split: ExpertSplit) -> dict[str, int]:
    """Rank columns of a job in the arenas of each linear; none where experts share factors."""
    columns = dict.fromkeys(EXPERT_LINEARS, 0)
    if not job.shares_outer:
        for target in _targets(spec, job, split):
            columns[target.linear] += target.rank
    return {name: -(-own // ARENA_RANKS) * ARENA_RANKS for name, own in columns.items()}


def copied_expert_elements(spec: ModelSpec, job: JobLoad, split: ExpertSplit | None) -> int:
    """Elements of the compute copy: rank columns in eights, B as wide as the linear."""
    if split is None:
        return 0
    if job.shares_outer:
        return expert_elements(spec, job, split).total
    columns = arena_columns(spec, job, split)
    first, second = (columns[name] for name in EXPERT_LINEARS)
    hidden, inner = split.hidden_size, split.inner
    return split.num_local * (first * (hidden + 2 * inner) + second * (inner + hidden))


class KeptInputs(NamedTuple):
    """What a layer's experts keep for adapters on them."""

    reads_routed: bool = False
    """Some adapter has factors of each expert on the first linear, and reads its input."""
    first_columns: int = 0
    """Rank columns of the first linear for every row at every expert."""
    second_columns: int = 0
    first_summed: int = 0
    """Rank columns for every row, of factors on the first linear that experts share."""
    summed: int = 0
    """Likewise on the second linear."""
    recomputes: bool = False
    """Some adapter reads what is between the linears."""
    reads_behind: bool = False
    """One of them with factors of its own, which reads it once SwiGLU's backward has made it."""


def kept_inputs(spec: ModelSpec, jobs: Sequence[JobLoad], split: ExpertSplit) -> KeptInputs:
    """Returns what adapters need; rank columns are those of the widest one, in whole chunks."""
    widths = {(name, outer): 0 for name in EXPERT_LINEARS for outer in (False, True)}
    for job in jobs:
        of_job = dict.fromkeys(widths, 0)
        for target in _targets(spec, job, split):
            of_job[target.linear, job.shares_outer] += target.rank
        widths = {key: max(width, of_job[key]) for key, width in widths.items()}
    first, second = ("experts_fc1", "experts_fc2")
    return KeptInputs(
        reads_routed=widths[first, False] > 0,
        first_columns=chunked(widths[first, False]) + widths[first, True],
        second_columns=chunked(widths[second, False]),
        first_summed=widths[first, True],
        summed=widths[second, True],
        recomputes=any(widths[second, outer] for outer in (False, True)),
        reads_behind=widths[second, False] > 0,
    )


class _JobWork(NamedTuple):
    """What adapters on experts take, by job."""

    routed: tuple[tuple[float, ...], tuple[float, ...]]
    """Seconds, forward and backward, of a row at an expert."""
    own: tuple[tuple[float, ...], tuple[float, ...]]
    """Likewise of a row of the micro-batch, of factors that experts share."""
    elements: tuple[float, ...]
    """Elements of all factors on the rank."""
    columns: int
    """Rank columns of all jobs in the arenas of both linears."""
    calls: int
    """Linears with adapters."""
    outer_calls: int
    """Those of them where experts share factors of some job."""


class ExpertLora:
    """Predicts the time of adapters on the routed experts of one model, for one mix of jobs."""

    def __init__(
        self, spec: ModelSpec, jobs: Sequence[JobLoad], rates: Rates, sums: JobSums
    ) -> None:
        self._spec, self._jobs, self._rates, self._sums = spec, tuple(jobs), rates, sums
        self._work: dict[ExpertSplit, _JobWork] = {}
        self.is_any = any(adapts_experts(job) for job in jobs)

    def times(
        self, split: ExpertSplit, load: RoundLoad, rows: float, bins: float
    ) -> tuple[float, float]:
        """Seconds forward and backward of one layer on the rank with most of a CP rank's rows."""
        if not self.is_any:
            return 0.0, 0.0
        work = self._work_of(split)
        filled = rows * load.filled_share
        routed, own = filled * split.routed * split.fullest(), filled * split.row_share
        elements = self._sums.present(load.job_sequences, bins, work.elements)
        size, copied = self._rates.element_bytes, self._rates.hardware.copy_bytes_per_s
        # Kernels are given zeros for the rank columns of all adapters of every row.
        zeros = routed * work.columns * size
        moved = elements * size + zeros, elements * (size + 2 * _FP32) + zeros
        cost, outer_s = self._rates.hardware.lora, self._rates.experts.outer(routed)
        fixed = cost.forward_fixed_s, cost.backward_fixed_s
        forward, backward = (
            work.calls * fixed[side]
            + work.outer_calls * outer_s
            + routed * self._sums.mean(load, work.routed[side])
            + own * self._sums.mean(load, work.own[side])
            + moved[side] / copied
            for side in (0, 1)
        )
        return forward, backward

    def _work_of(self, split: ExpertSplit) -> _JobWork:
        if split not in self._work:
            each = [self._row_seconds(job, split) for job in self._jobs]
            held = [(j, t.linear) for j in self._jobs for t in _targets(self._spec, j, split)]
            routed, own = (
                tuple(tuple(one[rows][side] for one in each) for side in (0, 1)) for rows in (0, 1)
            )
            self._work[split] = _JobWork(
                (routed[0], routed[1]),
                (own[0], own[1]),
                tuple(float(expert_elements(self._spec, j, split).total) for j in self._jobs),
                sum(sum(arena_columns(self._spec, job, split).values()) for job in self._jobs),
                len({linear for _, linear in held}),
                len({linear for job, linear in held if job.shares_outer}),
            )
        return self._work[split]

    def _row_seconds(
        self, job: JobLoad, split: ExpertSplit
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Seconds of a job's row at an expert and of one in the micro-batch, each both ways."""
        cost, size = self._rates.hardware.lora, self._rates.element_bytes
        targets = list(_targets(self._spec, job, split))
        cut = sum(target.rank * target.cut for target in targets)
        whole = sum(target.rank * target.whole for target in targets)
        products = (cut, whole) if job.shares_outer else (cut + whole, 0)
        seconds = []
        for moved, product in zip(_moved(targets, split, job.shares_outer), products, strict=True):
            forward, backward = (self._rates.stream_s(n * size) for n in moved)
            forward += cost.forward_rank_s * product
            seconds.append((forward, backward + 2 * cost.backward_rank_s * product))
        return seconds[0], seconds[1]


def _moved(
    targets: Sequence[_Sizes], split: ExpertSplit, shares_outer: bool
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Elements that kernels read and write for a row at an expert, and for one in the micro-batch.

    Each pair is forward and backward. With factors of each expert, forward reads the input of both
    linears; backward reads gradients of the output twice, for dS and for B, and the input again,
    which is written beside the second linear. Rows that were spread are read where they were
    before, and then the cache holds them for all of their experts but the first, unless they came
    from other ranks. Shared factors leave the GEMM: what they add to is read and written.
    """
    linears = {target.linear for target in targets}
    first, second = ("experts_fc1" in linears, "experts_fc2" in linears)
    hidden, inner = split.hidden_size, split.inner
    if not shares_outer:
        spread = first * hidden, (first + 2 * second) * hidden
        routed = second * inner, (4 * first + 2 * second) * inner
        if split.ep_size == 1:
            return routed, spread
        return (routed[0] + spread[0], routed[1] + spread[1]), (0, 0)
    routed = first * 4 * inner + second * inner, first * 4 * inner + second * 6 * inner
    own = first * hidden + second * 2 * hidden, first * 3 * hidden + second * 2 * hidden
    return routed, own


_INDEX = 8
"""Bytes of an integer that says where a row goes."""
_NO_ADAPTERS = KeptInputs()


class RoutedBytes(NamedTuple):
    """Bytes of one layer's router and experts, by row."""

    kept: float
    """Kept for backward, whoever computes the rows."""
    kept_routed: float
    """Kept for backward by the mean rank for the rows that its experts compute."""
    workspace: float
    """Of the backward of the fullest rank."""


def routed_bytes(split: ExpertSplit, size: int, adapters: KeptInputs = _NO_ADAPTERS) -> RoutedBytes:
    """Counts the bytes of a layer's router and experts, at `size` bytes of an activation.

    Kept are the first linear's outputs, the weights of the choices and where each row lies; for
    adapters also their rank columns and the experts' input. Backward needs most either at the
    second linear, at SwiGLU or behind the first linear.
    """
    spec, hidden, inner = split.spec, split.hidden_size, split.inner
    is_shared = split.ep_size > 1
    weight = _FP32 if spec.keeps_fp32 else size
    # Four integers say where a choice goes; behind an exchange one more says where it came from.
    choices = spec.top_k * (4 * _INDEX + _FP32)
    choices += 0 if spec.normalizes else spec.num_experts * _FP32
    each = 2 * inner * size + weight + is_shared * _INDEX
    # Rows that came from other ranks are kept; own ones are spread again.
    spread = adapters.reads_routed and not is_shared
    first = size * (hidden * spread + adapters.first_columns)
    second = size * (inner * adapters.recomputes + adapters.second_columns)
    between = size * (hidden + inner) + second
    swiglu = adapters.reads_behind * (inner + adapters.second_columns)
    before = size * (3 * inner + swiglu) + _FP32
    behind = size * (hidden + 2 * inner) + _FP32
    exchanged = is_shared * 2 * size * hidden
    logits = spec.num_experts * (_FP32 + size)
    each += (adapters.first_columns + adapters.second_columns) * size
    choices += adapters.summed * size
    if adapters.reads_routed and is_shared:
        each += hidden * size
    if adapters.first_summed or spread:
        choices += hidden * size
    return RoutedBytes(
        kept=split.row_share * choices,
        kept_routed=split.routed * each,
        workspace=(
            split.routed * split.fullest() * max(between, before, behind + max(first, exchanged))
            + split.row_share * (logits + adapters.first_summed * _FP32)
        ),
    )
