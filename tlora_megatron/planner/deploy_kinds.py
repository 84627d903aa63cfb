"""Kinds of replicas that a deployment may have, and bounds of its time if sequences were divisible.

The bound is the dual of a linear program. For prices p of the kinds, no division of the work ends
before `sum over classes of the least p * cost` / `sum over replicas of p`. Prices rise where a kind
has more than its part of the work; the shares are what the prices lead to, averaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tlora_megatron.config.schema import shared_fields
from tlora_megatron.model.dispatch import ReplicaRate
from tlora_megatron.model.layout import RECOMPUTES, ReplicaLayout
from tlora_megatron.model.micro_batches import cut
from tlora_megatron.planner.candidate import Plan, chunk_multiple, job_misfit, misfit
from tlora_megatron.planner.choices import CurveModel, ReplicaCurve, recompute_for_rows
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.fit import BUDGETS
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.layouts import Question, SearchSpace
from tlora_megatron.planner.workload import JobLoad, longest_of

_SIZES = (1, 2, 4, 8)
"""Sizes of TP, PP and CP: with powers of two no replica's ranks straddle nodes."""
_MOST_ROWS = 16384
"""Largest budget of replicas to mix, unless a sequence is longer: more only makes rounds longer."""
_MORE_ROWS = (24576, 32768)
"""Larger budgets to try where replicas are alike."""
_CLASSES = 16


class LengthClass(NamedTuple):
    """Sequences of all jobs' batches that fit into the same kinds of replicas."""

    longest: int
    rows: float
    squares: float
    """Sum of the squared rows of the sequences."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A replica's layout and its predicted costs."""

    plan: Plan
    """Layout, budget and recompute, with one replica."""
    curve: ReplicaCurve
    by_rows: tuple[Kind, ...] = ()
    """This layout under each recompute, lightest first, if they are chosen by rows."""

    @property
    def gpus(self) -> int:
        return self.plan.num_gpus

    @property
    def layout(self) -> ReplicaLayout:
        return ReplicaLayout(**shared_fields(self.plan, ReplicaLayout))

    @property
    def rate(self) -> ReplicaRate:
        """The speed by which rounds are shared out; with recompute by rows, as a line and a square
        through a short sequence of the lightest and the longest of the heaviest."""
        if not self.by_rows:
            return self.curve.rate
        short, long = 1024, self.curve.budget
        light_s, heavy_s = (
            self._of(rows).curve.seconds(1.0, float(rows)) for rows in (short, long)
        )
        square_s = max(0.0, (heavy_s - light_s) / (long - short))
        token_s = light_s - square_s * short
        return replace(self.curve, token_s=token_s, square_s=square_s, fixed_s=0.0).rate

    def seconds(self, classes: Iterable[LengthClass]) -> list[float]:
        """Time of one replica for each class as a whole; infinite where it does not fit."""
        return [
            self._of(c.longest).curve.seconds(c.rows, c.squares)
            if c.longest <= self.curve.budget
            else math.inf
            for c in classes
        ]

    def round_ps(self, lengths: Sequence[int]) -> int:
        """Picoseconds of one replica's part of a round, cut into micro-batches."""
        alike: dict[int, list[int]] = {}
        for rows in lengths:
            alike.setdefault(self._of(rows).curve.budget, []).append(rows)
        stages = self.plan.pp_size
        total = 0
        for budget, own in alike.items():
            parts = cut(own, budget, stages if stages > 1 else 0)
            total += self._of(budget).curve.round_ps([[own[i] for i in part] for part in parts])
        return total

    def _of(self, rows: int) -> Kind:
        """The layout under the recompute of a sequence of so many rows."""
        return next((kind for kind in self.by_rows if rows <= kind.curve.budget), self)


def length_classes(jobs: Sequence[JobLoad]) -> list[LengthClass]:
    """Divides the sequences of all jobs' batches by length into classes of equal rows."""
    return classes_of((n, job.batch_size * s) for job in jobs for n, s in job.lengths.pairs)


def classes_of(counts: Iterable[tuple[int, float]]) -> list[LengthClass]:
    """Divides counted lengths into classes of equal rows, cut at all budgets too."""
    merged: dict[int, float] = {}
    for length, count in counts:
        merged[length] = merged.get(length, 0.0) + count
    pairs = sorted(merged.items())
    most = sum(n * count for n, count in pairs) / _CLASSES
    classes, rows, squares = [], 0.0, 0.0
    for (length, count), following in zip(pairs, [*pairs[1:], (math.inf, 0.0)], strict=True):
        rows, squares = rows + length * count, squares + length**2 * count
        is_cut = any(length <= budget < following[0] for budget in BUDGETS)
        if is_cut or rows >= most or following[0] == math.inf:
            classes.append(LengthClass(length, rows, squares))
            rows = squares = 0.0
    return classes


def all_kinds(question: Question) -> tuple[list[Kind], list[Kind]]:
    """The kinds that fit into memory, of each layout and recompute those of the largest budgets.

    The second list has those with `run.recompute: auto`, where that leaves a choice; replicas of
    these are alike.
    """
    spec, jobs = question.spec, question.jobs
    hardware, space = question.hardware, question.space
    memory = MemoryModel(spec, jobs, hardware)
    curves = CurveModel(spec, jobs, hardware)
    recomputes = RECOMPUTES if space.recompute is None else (space.recompute,)
    longest = longest_of(jobs)
    most, found, by_rows = most_rows(longest), list[Kind](), list[Kind]()
    for layout in _layouts(hardware, question.num_gpus):
        if not space.allows(layout) or job_misfit(jobs, layout) is not None:
            continue
        for recompute in recomputes:
            for budget in _budgets(longest, layout, space):
                plan = replace(layout, micro_batch_tokens=budget, recompute=recompute)
                if misfit(spec, plan) is not None:
                    continue
                if memory.use(plan, float(budget)).total_bytes <= hardware.memory_bytes:
                    found.append(Kind(plan, curves.curve(plan)))
                    if budget <= most:
                        break
        chunks = chunk_multiple(layout)
        rows = space.micro_batch_tokens or -(-most // chunks) * chunks
        whole = replace(layout, micro_batch_tokens=rows)
        if layout.pp_size == 1 and space.recompute is None and misfit(spec, whole) is None:
            kind = kind_by_rows(memory, curves, whole, hardware.memory_bytes)
            by_rows += [] if kind is None else [kind]
    return found, by_rows


def _layouts(hardware: HardwareProfile, num_gpus: int) -> Iterator[Plan]:
    for tp in _SIZES:
        for cp in (n for n in _SIZES if tp * n <= min(8, hardware.gpus_per_node)):
            for pp in (n for n in _SIZES if tp * cp * n <= num_gpus):
                if tp * cp * pp > hardware.gpus_per_node and hardware.inter_node is None:
                    continue
                for sequence_parallel in (False, True) if tp > 1 else (False,):
                    yield Plan(
                        tp_size=tp, cp_size=cp, pp_size=pp, sequence_parallel=sequence_parallel
                    )


def _budgets(longest: int, layout: Plan, space: SearchSpace) -> list[int]:
    """Budgets to try, the largest first."""
    if space.micro_batch_tokens is not None:
        return [space.micro_batch_tokens]
    most, chunks = most_rows(longest), chunk_multiple(layout)
    tried = {budget for budget in BUDGETS if budget < most}
    tried |= {most} | {budget for budget in _MORE_ROWS if budget > most}
    return sorted({-(-budget // chunks) * chunks for budget in tried}, reverse=True)


def most_rows(longest: int) -> int:
    """The largest budget of replicas to mix: `_MOST_ROWS`, or what holds the longest sequence."""
    return max(-(-longest // 1024) * 1024, _MOST_ROWS)


def kind_by_rows(
    memory: MemoryModel, curves: CurveModel, plan: Plan, budget_bytes: float
) -> Kind | None:
    """A plan's layout with `run.recompute: auto`; None where that leaves no choice."""
    table = recompute_for_rows(memory, plan, budget_bytes).most_rows
    if len(table) == 1 or table[-1][1] < plan.micro_batch_tokens:
        return None
    plans = [replace(plan, recompute=name, micro_batch_tokens=rows) for name, rows in table]
    each = [Kind(own, curves.curve(own)) for own in plans]
    return replace(each[-1], by_rows=tuple(each))


def undominated(kinds: Sequence[Kind], classes: Sequence[LengthClass]) -> list[Kind]:
    """Leaves out kinds that another replaces: on no more GPUs, as cheap everywhere."""
    costs = [tuple(kind.gpus * s for s in kind.seconds(classes)) for kind in kinds]
    kept: list[int] = []
    order = sorted(range(len(kinds)), key=lambda i: (kinds[i].gpus, costs[i]))
    for i in order:
        if not any(all(a <= b for a, b in zip(costs[k], costs[i], strict=True)) for k in kept):
            kept.append(i)
    return [kinds[i] for i in kept]


_STEPS, _FIRST_STEP, _LATER_STEP = 60, 0.6, 0.92
_MOVES = 200
_EVEN = 1e-4

Costs = Sequence[Sequence[float]]
"""Seconds that one replica of a kind takes for a whole class, by kind and class; infinite where it
does not fit."""


class Prices(NamedTuple):
    """Prices of the kinds, and the least cost of all work at them."""

    prices: tuple[float, ...]
    value: float

    def bound_s(self, counts: Sequence[int]) -> float:
        """No division of the work over so many replicas of each kind ends sooner."""
        return self.value / sum(p * n for p, n in zip(self.prices, counts, strict=True))


class Division(NamedTuple):
    makespan_s: float
    """Time of the kind that ends last."""
    prices: Prices
    """Those of the best bound that was found."""
    shares: tuple[tuple[float, ...], ...]
    """Share of each class that each kind has."""


def divide(costs: Costs, counts: Sequence[int]) -> Division:
    """Divides the work over replicas so that all end at about the same time."""
    best, shares = _search(costs, counts)
    loads = [_dot(own, cost) for own, cost in zip(shares, costs, strict=True)]
    for _ in range(_MOVES):
        if not _move(costs, counts, best.prices, shares, loads):
            break
    makespan = max(load / n for load, n in zip(loads, counts, strict=True))
    return Division(makespan, best, tuple(map(tuple, shares)))


def _search(costs: Costs, counts: Sequence[int]) -> tuple[Prices, list[list[float]]]:
    """The best prices, and how often the later ones led each class to each kind."""
    kinds, replicas = range(len(costs)), sum(counts)
    by_class = list(zip(*costs, strict=True))
    shares = [[0.0] * len(by_class) for _ in kinds]
    prices, step, weight = [1.0 / replicas] * len(costs), _FIRST_STEP, 0.0
    best, best_s = Prices(tuple(prices), 0.0), -1.0
    for turn in range(_STEPS):
        loads, value, weight = [0.0] * len(costs), 0.0, weight + step * (2 * turn >= _STEPS)
        for place, own in enumerate(by_class):
            priced = [p * cost for p, cost in zip(prices, own, strict=True)]
            least = min(priced)
            kind = priced.index(least)
            loads[kind] += own[kind]
            value += least
            shares[kind][place] += step * (2 * turn >= _STEPS)
        if value > best_s:  # prices of all replicas add up to 1
            best, best_s = Prices(tuple(prices), value), value
        prices = _stepped(prices, loads, counts, step)
        step *= _LATER_STEP
    return best, [[share / weight for share in own] for own in shares]


def _stepped(
    prices: Sequence[float], loads: Sequence[float], counts: Sequence[int], step: float
) -> list[float]:
    mean = sum(loads) / sum(counts)
    excess = (min(1.0, load / n / mean - 1) for load, n in zip(loads, counts, strict=True))
    moved = [p * math.exp(step * e) for p, e in zip(prices, excess, strict=True)]
    scale = _dot(moved, counts)
    return [p / scale for p in moved]


def _move(
    costs: Costs,
    counts: Sequence[int],
    prices: Sequence[float],
    shares: list[list[float]],
    loads: list[float],
) -> bool:
    """Moves part of a class from a kind that ends last to one that ends sooner.

    Kinds that end together may have to make way for each other, so all of them give.
    """
    ends = [load / n for load, n in zip(loads, counts, strict=True)]
    last = max(ends) * (1 - _EVEN)
    choices = (
        (prices[taker] * costs[taker][place] / (prices[giver] * costs[giver][place]), giver, taker,
         place)
        for giver, own in enumerate(shares)
        if ends[giver] >= last
        for place, share in enumerate(own)
        if share > 0
        for taker, end in enumerate(ends)
        if end < last and costs[taker][place] < math.inf
    )  # fmt: skip
    found = min(choices, default=None)
    if found is None:
        return False
    _, giver, taker, place = found
    gain = costs[giver][place] / counts[giver] + costs[taker][place] / counts[taker]
    part = min(shares[giver][place], (ends[giver] - ends[taker]) / gain)
    shares[giver][place] -= part
    shares[taker][place] += part
    loads[giver] -= part * costs[giver][place]
    loads[taker] += part * costs[taker][place]
    return True


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True) if x)
