"""Predicts the time of a layer's router and experts, routed and shared, as a plan divides them.

Nobody knows a router's choices before it has seen the jobs' tokens, so they are assumed: the shares
of a layer's experts in its rows are taken for those of independent exponential variables. The most
loaded of 128 experts then has 5.4 times the mean (real routers: 4 to 8), of 8 it has 2.7 times.
What a profile's rates leave out, the choice of experts above all, is fitted to measured rows
(`expert_times`); of several GPUs that share experts nothing was measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlora_megatron.config.job import EXPERT_TARGETS, FUSED_EXPERT_TARGETS
from tlora_megatron.model.spec import (
    ALL_LINEARS,
    SHARED_EXPERT_LINEARS,
    ExpertsSpec,
    ModelSpec,
    refuse_gpt_oss,
)
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.adapter_sizes import dense_linears
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.layouts import group_span
from tlora_megatron.planner.workload import JobLoad

_FP32 = 4


class SharedBytes(NamedTuple):
    """Bytes of one layer's shared expert for each row of a context-parallel rank."""

    kept: float
    """Kept for backward."""
    workspace: float
    """Of its backward, beside the gradient that the routed experts have returned."""


def gate_passes(spec: ModelSpec, size: int) -> tuple[float, float]:
    """Bytes read and written for a row by the gate and the sum, forward and backward.

    Forward, x is read for the sigmoid, the result is weighed and added to the routed experts'.
    Backward, the sigmoid's gradient is a product in fp32, summed over the row; dy is weighed, and
    both gradients of x are added to each other and to the routed experts'.
    """
    if spec.shared_ffn_size is None:
        return 0.0, 0.0
    cast = 0 if size == _FP32 else 2 * (size + _FP32)
    product = 4 * _FP32
    forward, backward = (1 + 2 + 3) * size, cast + product + (2 + 1 + 3 + 3) * size
    return float(forward * spec.hidden_size), float(backward * spec.hidden_size)


def shared_bytes(
    spec: ModelSpec, ranks: dict[str, float], plan: Plan, size: int, *, keeps_input: bool
) -> SharedBytes:
    """Counts what a shared expert keeps and works in; nothing without one.

    Kept are gate and up, what comes out before it is weighed, and the weight; for adapters also
    their inputs and rank columns (`SavedInputs.ranks`), unless the routed experts' keep the same
    rows.
    """
    if spec.shared_ffn_size is None:
        return SharedBytes(0.0, 0.0)
    hidden, inner = spec.hidden_size, spec.shared_ffn_size / plan.tp_size
    shard = plan.tp_size if plan.sequence_parallel else 1
    first, second = (ranks[linear] for linear in SHARED_EXPERT_LINEARS)
    kept = 2 * inner * size + (hidden * size + size) / shard
    kept += (first > 0 and keeps_input) * hidden * size / shard
    kept += (second > 0) * inner * size + (first + second) * size
    # Either the gate's gradient: dy and the result in fp32, and their product; or the gradients of
    # gate, up and their product. The routed experts' dx waits beside.
    gate = (2 * (size != _FP32) + 1) * _FP32 * hidden / shard
    return SharedBytes(kept, hidden * size / shard + max(gate, 3 * inner * size))


_STEPS = 1024


@functools.lru_cache(maxsize=4096)
def fullest_share(ranks: int, experts: int) -> float:
    """Returns the expected rows of the fullest of some ranks over those of the mean one.

    Sums of `experts` exponential variables, of a rank or all layers, are gamma variables, whose
    distribution is taken by Wilson and Hilferty's approximation (PNAS 17, 1931).
    """
    if ranks == 1:
        return 1.0
    most = 1 + (4 + math.sqrt(2 * math.log(ranks))) * max(1 / math.sqrt(experts), 2 / experts)
    step = most / _STEPS

    def below(share: float) -> float:
        """Probability that a rank has less than a share of the mean rank's rows."""
        deviation = 3 * math.sqrt(experts) * (math.cbrt(share) - 1 + 1 / (9 * experts))
        return (1 + math.erf(deviation / math.sqrt(2))) / 2

    shares = ((n + 0.5) * step for n in range(_STEPS))
    return step * math.fsum(1 - math.pow(below(share), ranks) for share in shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSplit:
    """One rank's part of a layer's experts."""

    spec: ExpertsSpec
    hidden_size: int
    ep_size: int
    """Ranks that share the experts."""
    num_local: int
    """Experts of the rank."""
    inner: int
    """Hidden features of each of them on the rank."""
    expert_tp: int
    """Tensor-parallel ranks that cut each of them."""
    row_share: float
    """Share of a context-parallel rank's rows that the rank routes: with sequence parallelism and
    experts that are whole, a tensor-parallel rank routes its own rows alone."""

    @property
    def weights(self) -> int:
        """Elements of the router, which every rank has whole, and of the rank's experts."""
        router = self.spec.num_experts * self.hidden_size
        return router + self.num_local * 3 * self.inner * self.hidden_size

    @property
    def routed(self) -> float:
        """Rows that the mean rank's experts compute for each row of a context-parallel rank."""
        return self.row_share * self.spec.top_k

    def fullest(self, layers: int = 1) -> float:
        """Rows of the fullest rank over those of the mean one, in the sum over some layers."""
        return fullest_share(self.ep_size, self.num_local * layers)


def expert_split(spec: ModelSpec, plan: Plan) -> ExpertSplit | None:
    """Returns how a plan divides a model's experts; None if the model has none."""
    if spec.experts is None:
        return None
    return _split(spec, plan.tp_size, plan.ep_size, plan.expert_tp)


def check_predictable(spec: ModelSpec, jobs: Sequence[JobLoad]) -> None:
    """Refuses gpt-oss, and jobs with a target that a base with routed experts does not predict."""
    if spec.experts is None:
        return
    refuse_gpt_oss(spec.model_type, "the base of a prediction")
    known = [t for names in dense_linears(spec).values() for n in names for t in ALL_LINEARS[n]]
    known += EXPERT_TARGETS + FUSED_EXPERT_TARGETS
    for job in jobs:
        for target in job.targets:
            if target not in known:
                raise ValueError(
                    f"targets of job {job.name!r} must be among {', '.join(known)} for a "
                    f"prediction over routed experts, got {target}"
                )


@functools.lru_cache(maxsize=1024)
def _split(spec: ModelSpec, tp_size: int, ep_size: int, expert_tp: int) -> ExpertSplit:
    assert spec.experts is not None, "the model has experts"
    return ExpertSplit(
        spec=spec.experts,
        hidden_size=spec.hidden_size,
        ep_size=ep_size,
        num_local=spec.experts.num_experts // ep_size,
        inner=spec.ffn_size // expert_tp,
        expert_tp=expert_tp,
        row_share=1.0 if expert_tp == tp_size else 1 / tp_size,
    )


_AFTER_WAIT = 0.07
"""Share of a layer's host time in which the GPU idles behind the wait for the numbers of rows: from
there to the first large kernel the host makes about 12 of a layer's 170 calls (counted for 8
experts a row, attention and adapters included)."""

_Both = tuple[float, float]
"""Forward and backward."""


class RoutedCost(NamedTuple):
    """Seconds of one layer's router and experts, forward and backward, for the mean rank's rows."""

    gemm_s: _Both
    stream_s: _Both
    exchange_s: _Both
    """All-to-alls, the host's wait before them, and the wait for the fullest rank."""


class RoutedWork:
    """Predicts times of the experts of one model on one kind of machine."""

    def __init__(self, spec: ModelSpec, rates: Rates) -> None:
        self._spec, self._rates = spec, rates

    def cost(self, plan: Plan, rows: float) -> RoutedCost:
        """The time of one layer on the rows of a context-parallel rank's micro-batch."""
        split = expert_split(self._spec, plan)
        assert split is not None, "the model has experts"
        own, routed = rows * split.row_share, rows * split.routed
        products = self._products(split, routed)
        passes = self._passes(split, routed)
        routing = self._rates.experts.routing(routed)
        exchange = self._exchange(split, plan, routed)
        late = split.fullest() - 1
        # The GPU idles until the host, which has waited for it, is ahead again.
        wait_s = _AFTER_WAIT * self._rates.hardware.host.layer_s if plan.ep_size > 1 else 0.0
        return RoutedCost(
            gemm_s=added(self._router(split, own), products),
            stream_s=added(added(self._scores(split, own), passes), routing),
            exchange_s=(
                (1 + late) * exchange[0] + late * (products[0] + passes[0]) + wait_s,
                (1 + late) * exchange[1] + late * (products[1] + passes[1]),
            ),
        )

    def _router(self, split: ExpertSplit, rows: float) -> _Both:
        """Time of the logits, which are computed once more where scores are not normalised."""
        shape = split.spec.num_experts, split.hidden_size
        forward = self._rates.gemm_s(rows, *shape)
        again = 1 if split.spec.normalizes else 2
        return again * forward, self._rates.gemm_s(rows, *shape, backward=True)

    def _scores(self, split: ExpertSplit, rows: float) -> _Both:
        """Time of passes over scores and their gradients `[rows, num_experts]`."""
        size = self._rates.element_bytes
        again = 1 if split.spec.normalizes else 2
        forward = again * (size + 3 * _FP32) + _FP32
        backward = 3 * _FP32 + size
        moved = rows * split.spec.num_experts
        return self._rates.stream_s(moved * forward), self._rates.stream_s(moved * backward)

    def _products(self, split: ExpertSplit, rows: float) -> _Both:
        """Time of both linears of the rank's experts."""
        shapes = (2 * split.inner, split.hidden_size), (split.hidden_size, split.inner)
        forward, backward = (
            sum(
                self._rates.grouped_gemm_s(rows, split.num_local, *shape, backward=side)
                for shape in shapes
            )
            for side in (False, True)
        )
        return forward, backward

    def _passes(self, split: ExpertSplit, rows: float) -> _Both:
        """Time of passes that spread rows, weigh and activate them, and sum them up again."""
        size, hidden, inner = self._rates.element_bytes, split.hidden_size, split.inner
        ordered = 2 * 2 * hidden if split.ep_size > 1 else 0
        moved = (2 + 1 + 1 / split.spec.top_k) * hidden + ordered
        # SwiGLU with the weights in one kernel, and its gradients in another.
        forward, backward = moved + 3 * inner, moved + 5 * inner
        seconds = self._rates.stream_s(rows * forward * size)
        return seconds, self._rates.stream_s(rows * backward * size)

    def _exchange(self, split: ExpertSplit, plan: Plan, rows: float) -> _Both:
        """Time of all-to-alls: counts, weights, rows there and back; then their gradients."""
        if split.ep_size == 1:
            return 0.0, 0.0
        size = self._rates.element_bytes
        weight = _FP32 if split.spec.keeps_fp32 else size
        counts = split.spec.num_experts * 8
        hidden = rows * split.hidden_size * size
        forward = (counts, rows * weight, hidden, hidden)
        backward = (hidden, hidden, rows * _FP32)
        hardware = self._rates.hardware
        over = group_span(split.ep_size, split.expert_tp, plan.num_gpus, hardware.gpus_per_node)
        stretch = hardware.stretch
        there, back = (
            stretch * sum(self._rates.all_to_all_s(split.ep_size, n, over=over) for n in sizes)
            for sizes in (forward, backward)
        )
        return there, back


def added(one: _Both, other: _Both) -> _Both:
    return one[0] + other[0], one[1] + other[1]
