"""Predicts times of single operations by a profile's points, and of collectives over nodes.

`python -m scripts.bench.experts.predicted --fit` fits the times around routed experts. Collectives
over nodes are timed by the terms of NCCL's own model, `ncclTopoTuneModel` (src/graph/tuning.cc of
NCCL 2.28 to 2.30): a ring passes through all of a group's GPUs of a node before it leaves by one of
the cards near them, all of which send at once; a tree sends the tensor up and down once. Left out:
NVLS, SHARP, PAT, and networks that share their switches' uplinks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tlora_megatron.planner.hardware import CollectiveOp, GemmPoint, HardwareProfile, Link
from tlora_megatron.planner.layouts import Span

FITTED_CHOICES = 65536
"""Choices of experts (rows times `top_k`) in a measured micro-batch of Qwen3-30B-A3B."""
ROUTING_FORWARD = 0.8
"""Share of a layer's small kernels that forward has: 19 of 28 operations, among them top-k and two
sorts, which are several kernels each."""
FIXED = 0.5
"""Share of small kernels' time that does not grow with rows; assumed, since nearly all measured
micro-batches have as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTimes:
    """Seconds, alike on all GPUs: what takes them are many short kernels and the host."""

    routing_s: float = 0.0
    """Of a layer's choices of experts and their order, forward and backward."""
    outer_linear_s: float = 0.0
    """Of the further short kernels at a linear whose outer factors experts share, both ways."""
    job_step_s: float = 0.0
    """Of an optimizer step of a job with adapters on experts, beside the bytes of its elements."""

    def routing(self, choices: float) -> tuple[float, float]:
        """Seconds of one layer's choices, forward and backward."""
        seconds = self.routing_s * _grown(choices)
        return ROUTING_FORWARD * seconds, (1 - ROUTING_FORWARD) * seconds

    def outer(self, choices: float) -> float:
        """Seconds of each direction at a linear whose outer factors experts share."""
        return self.outer_linear_s / 2 * _grown(choices)


def _grown(choices: float) -> float:
    return FIXED + (1 - FIXED) * choices / FITTED_CHOICES


EXPERT_TIMES = ExpertTimes(routing_s=593e-6, outer_linear_s=204e-6, job_step_s=387e-6)
"""Those of the kernels and the host that were measured."""


_TREE_SHARE = 0.92
"""Share of the bandwidth that a tree attains (`ncclTopoTuneModel`)."""
_RING_S, _STEP_S, _NETWORK_STEP_S = 14e-6, 1.9e-6, 4.0e-6
"""Start of a ring, a step of it over NVLink and one over the network: `ncclTunerConstantsDefaults`,
protocol LL128."""


def over_nodes_s(
    op: CollectiveOp, span: Span, size_bytes: float, hardware: HardwareProfile
) -> float:
    """Time of a collective over nodes, of a tensor gathered, or before it is scattered.

    Raises:
        ValueError: if the profile has no link between nodes.
    """
    link = _link_between(span, hardware)
    if op == "p2p":
        return link.latency_s + size_bytes / hardware.gpu_network_bytes_per_s
    knows_cards = hardware.nics_per_node is not None
    rails = hardware.gpu_network_bytes_per_s * (span.local if knows_cards else 1)
    near = hardware.intra_node.bytes_per_s if span.local > 1 else math.inf
    turns = 2 if op == "all_reduce" else 1
    # Latencies of one way through the levels of a tree, and around a ring.
    outer = math.ceil(math.log2(span.nodes))
    inner = math.ceil(math.log2(span.ranks)) - outer
    start_s = turns * (outer * link.latency_s + inner * hardware.intra_node.latency_s)
    around_s = (span.ranks - span.nodes) * _STEP_S + (span.nodes - 1) * _NETWORK_STEP_S
    ring_start_s = max(start_s, turns * (_RING_S + around_s)) if knows_cards else start_s
    share = turns * (span.ranks - 1) / span.ranks
    ring_s = ring_start_s + share * size_bytes / min(rails, near)
    if op != "all_reduce" or not knows_cards:
        return ring_s
    between = (1 if span.nodes == 2 else 2) * size_bytes / rails
    tree_s = start_s + max(between, 2 * size_bytes / near) / _TREE_SHARE
    return min(ring_s, tree_s)


def _link_between(span: Span, hardware: HardwareProfile) -> Link:
    if hardware.inter_node is None:
        raise ValueError(f"inter_node must be given for {span.ranks} GPUs of several nodes")
    return hardware.inter_node


_GROUP_TILE = 128
"""Rows of a tile of a grouped product; each group's last tile is half full on average."""
_NEIGHBOURS = 4
"""Number of measured GEMM shapes that an unmeasured one is interpolated from."""

_Table = tuple[list[float], list[float], list[float]]
"""Ascending abscissas, and forward and backward rates at each."""


class _GemmRates:
    """Rates of GEMMs between measured points."""

    def __init__(self, gemms: Sequence[GemmPoint]) -> None:
        points = defaultdict(list)
        for p in gemms:
            points[p.columns, p.inner].append(
                (math.log(p.rows), p.forward_flops_per_s, p.backward_flops_per_s)
            )
        self._measured = {shape: _table(rows) for shape, rows in points.items()}
        self._tables: dict[tuple[int, int], _Table] = {}

    def rate(self, rows: float, columns: int, inner: int, *, backward: bool) -> float:
        """Operations per second of a GEMM, or of its input gradient."""
        table = self._tables.get((columns, inner))
        if table is None:
            table = self._tables[columns, inner] = self._blend(columns, inner)
        return _at(math.log(max(rows, 1.0)), table[0], table[2 if backward else 1])

    def _blend(self, columns: int, inner: int) -> _Table:
        """Rates of a shape: its own if measured, otherwise a weighted mean of its nearest."""
        if (columns, inner) in self._measured:
            return self._measured[columns, inner]
        near = sorted(
            (math.hypot(math.log(c / columns), math.log(k / inner)), (c, k))
            for c, k in self._measured
        )[:_NEIGHBOURS]
        weights = [(1.0 / distance**2, self._measured[shape]) for distance, shape in near]
        total = sum(weight for weight, _ in weights)
        grid = sorted({x for _, table in weights for x in table[0]})
        forward, backward = (
            [sum(w * _at(x, t[0], t[side]) for w, t in weights) / total for x in grid]
            for side in (1, 2)
        )
        return grid, forward, backward


class Rates:
    """Predicts operations from one profile, also around routed experts; caches results."""

    def __init__(self, hardware: HardwareProfile, experts: ExpertTimes = EXPERT_TIMES) -> None:
        self.hardware, self.experts = hardware, experts
        self.element_bytes = hardware.element_bytes
        self._gemms = _GemmRates(hardware.gemms)
        self._fp8_gemms = _GemmRates(hardware.fp8_gemms) if hardware.fp8_gemms else None
        self._attention = _table(
            (math.log(p.length), p.forward_flops_per_s, p.backward_flops_per_s)
            for p in hardware.attention
        )
        collectives = defaultdict(list)
        for c in hardware.collectives:
            collectives[c.op, c.ranks].append((float(c.bytes), c.seconds, c.seconds))
        self._collectives = {key: _table(rows) for key, rows in collectives.items()}

    def gemm_s(
        self, rows: float, columns: int, inner: int, *, backward: bool = False, fp8: bool = False
    ) -> float:
        """Time of a GEMM `[rows, inner] x [inner, columns]`, or of its input gradient.

        It is never faster than its operands can be read and written. Where the weight is FP8 codes,
        what it is multiplied with is quantised before.
        """
        flops = 2.0 * rows * columns * inner
        if not fp8:
            moved = (rows * (columns + inner) + columns * inner) * self.element_bytes
            rate = self._gemms.rate(rows, columns, inner, backward=backward)
        else:
            quantised, written = (columns, inner) if backward else (inner, columns)
            moved = rows * (quantised + written * self.element_bytes) + columns * inner
            if self._fp8_gemms is not None:
                rate = self._fp8_gemms.rate(rows, columns, inner, backward=backward)
            else:
                speedup = self.hardware.fp8_speedup
                assert speedup is not None, "FP8 linears must have a rate"
                rate = speedup * self._gemms.rate(rows, columns, inner, backward=backward)
        return max(flops / rate, moved / self.hardware.copy_bytes_per_s)

    def grouped_gemm_s(
        self, rows: float, groups: int, columns: int, inner: int, *, backward: bool = False
    ) -> float:
        """Time of products with `groups` weights, each with its part of the rows.

        In bf16 they are one launch, which is taken to have the rate of one product of all rows and
        to fill each group's last tile; it reads every weight. Otherwise each is a product alone.
        """
        if self.element_bytes != 2:
            return groups * self.gemm_s(rows / groups, columns, inner, backward=backward)
        padded = rows + groups * _GROUP_TILE / 2
        rate = self._gemms.rate(padded, columns, inner, backward=backward)
        moved = (rows * (columns + inner) + groups * columns * inner) * self.element_bytes
        flops = 2.0 * padded * columns * inner
        return max(flops / rate, moved / self.hardware.copy_bytes_per_s)

    @property
    def multiplies_fp8(self) -> bool:
        """True if FP8 linears were measured, or are known by their ratio."""
        return bool(self.hardware.fp8_gemms) or self.hardware.fp8_speedup is not None

    def attention_s(self, length: int, heads: float, head_dim: int) -> tuple[float, float]:
        """Time of causal attention of one sequence, forward and backward."""
        pairs = length * (length + 1) / 2
        xs, forward, backward = self._attention
        x = math.log(length)
        flops = 4.0 * pairs * heads * head_dim
        return flops / _at(x, xs, forward), 2.5 * flops / _at(x, xs, backward)

    def stream_s(self, moved_bytes: float) -> float:
        """Time of elementwise passes that read and write so many bytes."""
        return moved_bytes / self.hardware.stream_bytes_per_s

    def collective_s(
        self, op: CollectiveOp, ranks: int, size_bytes: float, *, over: Span | None = None
    ) -> float:
        """Time of a collective of a tensor that is gathered, or before it is scattered."""
        if ranks <= 1 or size_bytes <= 0:
            return 0.0
        if over is not None and over.nodes > 1:
            return over_nodes_s(op, over, size_bytes, self.hardware)
        table = self._collectives.get((op, ranks))
        if table is None:
            return _ring_s(op, ranks, size_bytes, self.hardware.intra_node)
        xs, seconds, _ = table
        if size_bytes > xs[-1]:
            return seconds[-1] * size_bytes / xs[-1]
        return _at(size_bytes, xs, seconds)

    def all_to_all_s(self, ranks: int, size_bytes: float, *, over: Span) -> float:
        """Time of an all-to-all with equal parts of what a rank sends, its own part included.

        In a node it is taken for as long as an all-gather, in which every GPU receives as much.
        Over nodes all GPUs of a node send at once, so each has its share of the cards. What stays
        in the node goes over NVLink at the same time.
        """
        if over.nodes == 1:
            return self.collective_s("all_gather", ranks, size_bytes)
        link = _link_between(over, self.hardware)
        far, near = over.ranks - over.local, over.local - 1
        over_network_s = far * size_bytes / over.ranks / self.hardware.gpu_network_bytes_per_s
        in_node_s = near * size_bytes / over.ranks / self.hardware.intra_node.bytes_per_s
        return link.latency_s + max(over_network_s, in_node_s)


def _ring_s(op: CollectiveOp, ranks: int, size_bytes: float, link: Link) -> float:
    """Time of a ring: each GPU sends `(n - 1) / n` of the tensor, twice in an all-reduce."""
    if op == "p2p":
        return link.latency_s + size_bytes / link.bytes_per_s
    turns = 2 if op == "all_reduce" else 1
    share = turns * (ranks - 1) / ranks
    hops = turns * math.ceil(math.log2(ranks))
    return hops * link.latency_s + share * size_bytes / link.bytes_per_s


def _table(points: object) -> _Table:
    xs, forward, backward = zip(*sorted(points), strict=True)  # type: ignore[call-overload]
    return list(xs), list(forward), list(backward)


def _at(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolates linearly between points; constant beyond them."""
    index = bisect_left(xs, x)
    if index == 0:
        return ys[0]
    if index == len(xs):
        return ys[-1]
    share = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
    return ys[index - 1] + share * (ys[index] - ys[index - 1])
