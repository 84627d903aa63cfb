"""Chooses how many replicas of which kinds a number of GPUs is divided into.

Up to `_EXACT` GPUs all counts of all sets of at most `_MOST_KINDS` kinds are looked at, except
those that a bound shows to be worse than the best so far. Beyond that, each set starts from what
the bound would have if replicas could be divided, and gives some up for others while that helps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlora_megatron.planner.deploy.fluid import Division, Prices, divide

_EXACT = 32
_MOST_KINDS = 4
"""More bring tenths of a percent, and each is process groups and shapes of kernels of its own."""
_MOST_SETS = 64
"""Sets of kinds to look at beyond `_EXACT` GPUs, those of the least bound first."""
_KEPT = 24
_WORTH = 1e-3
"""Share of the time below which one deployment counts as no better than another."""


class Counts(NamedTuple):
    """Replicas of some kinds, and the time of all work on them."""

    makespan_s: float
    kinds: tuple[int, ...]
    """Their numbers, ascending."""
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The work and the kinds of replicas that may share it."""

    gpus: tuple[int, ...]
    """GPUs of one replica, by kind."""
    costs: tuple[tuple[float, ...], ...]
    """Seconds that one replica takes for a whole class, by kind and class."""
    num_gpus: int

    @property
    def bound_s(self) -> float:
        """No deployment ends sooner: all replicas busy, every class where it costs least."""
        return self.bound_of(range(len(self.gpus))) if self.gpus else math.inf

    def bound_of(self, kinds: Sequence[int]) -> float:
        """No deployment of these kinds alone ends sooner; infinite if a class fits none."""
        by_class = zip(*(self.costs[k] for k in kinds), strict=True)
        gpus = [self.gpus[k] for k in kinds]
        priced = (min(g * s for g, s in zip(gpus, own, strict=True)) for own in by_class)
        gpu_s: float = sum(priced)
        return gpu_s / self.num_gpus


def best_counts(problem: Problem) -> list[Counts]:
    """Returns deployments of several kinds or one, the best first; empty if none holds all.

    Every one uses as many of the GPUs as its kinds can.
    """
    search = _Search(problem)
    sets = [
        (problem.bound_of(kinds), kinds)
        for size in range(1, _MOST_KINDS + 1)
        for kinds in itertools.combinations(range(len(problem.gpus)), size)
        if sum(problem.gpus[k] for k in kinds) <= problem.num_gpus
    ]
    sets = sorted((bound, kinds) for bound, kinds in sets if bound < math.inf)
    exact = problem.num_gpus <= _EXACT
    for bound, kinds in sets if exact else sets[:_MOST_SETS]:
        if bound >= search.best_s * (1 - _WORTH):
            break
        search.look_at(kinds, exact=exact)
    return sorted(search.found)


class _Search:
    """Deployments found so far."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.found: list[Counts] = []
        self.best_s = math.inf

    def look_at(self, kinds: tuple[int, ...], *, exact: bool) -> None:
        """Looks for the best counts of a set of kinds, each at least 1."""
        within = _Set(self._problem, kinds)
        if exact:
            for counts in _all_counts(within.gpus, self._problem.num_gpus):
                if within.bound_s(counts) < self.best_s * (1 - _WORTH):
                    self._add(within, counts)
        else:
            self._improve(within, within.start())

    def _improve(self, within: _Set, counts: tuple[int, ...]) -> None:
        best = self._add(within, counts)
        tried = {counts}
        is_better = True
        while is_better:
            is_better = False
            for changed in within.neighbours(counts):
                known = changed in tried or within.bound_s(changed) >= best * (1 - _WORTH)
                tried.add(changed)
                if not known and (found := self._add(within, changed)) < best * (1 - _WORTH):
                    counts, best, is_better = changed, found, True
                    break

    def _add(self, within: _Set, counts: tuple[int, ...]) -> float:
        makespan = within.divide(counts).makespan_s
        self.found.append(Counts(makespan, within.kinds, counts))
        self.found.sort()
        del self.found[_KEPT:]
        self.best_s = min(self.best_s, makespan)
        return makespan


class _Set:
    """A set of kinds, and the prices that its counts have led to: each bounds all others."""

    def __init__(self, problem: Problem, kinds: tuple[int, ...]) -> None:
        self.kinds = kinds
        self.gpus = tuple(problem.gpus[k] for k in kinds)
        self._costs = [problem.costs[k] for k in kinds]
        self._num_gpus = problem.num_gpus
        by_class = zip(*self._costs, strict=True)
        value = sum(min(g * s for g, s in zip(self.gpus, own, strict=True)) for own in by_class)
        self._prices = [Prices(tuple(map(float, self.gpus)), value)]

    def bound_s(self, counts: Sequence[int]) -> float:
        """No division of the work over these replicas ends sooner."""
        return max(prices.bound_s(counts) for prices in self._prices)

    def divide(self, counts: Sequence[int]) -> Division:
        """Divides the work, and keeps the prices."""
        division = divide(self._costs, counts)
        self._prices.append(division.prices)
        return division

    def start(self) -> tuple[int, ...]:
        """Counts near those that the bound would have, with the rest given to the smallest."""
        by_class = zip(*self._costs, strict=True)
        loads = [0.0] * len(self.kinds)
        for own in by_class:
            priced = [g * s for g, s in zip(self.gpus, own, strict=True)]
            kind = priced.index(min(priced))
            loads[kind] += priced[kind]
        scale = self._num_gpus / sum(loads)
        counts = [max(1, int(load * scale / g)) for load, g in zip(loads, self.gpus, strict=True)]
        while (over := self._free(counts)) < 0:
            kind = max(range(len(counts)), key=lambda k: (counts[k] > 1, counts[k] * self.gpus[k]))
            counts[kind] -= min(counts[kind] - 1, -(over // self.gpus[kind]))
        return self._filled(counts)

    def neighbours(self, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Counts with some replicas of one kind given up for others."""
        pairs = itertools.permutations(range(len(counts)), 2)
        for (giver, taker), given in itertools.product(list(pairs), (1, 2, 4, 8)):
            freed = given * self.gpus[giver] + self._free(counts)
            if counts[giver] > given and freed >= self.gpus[taker]:
                changed = list(counts)
                changed[giver] -= given
                changed[taker] += freed // self.gpus[taker]
                yield self._filled(changed)

    def _free(self, counts: Sequence[int]) -> int:
        return self._num_gpus - sum(n * g for n, g in zip(counts, self.gpus, strict=True))

    def _filled(self, counts: list[int]) -> tuple[int, ...]:
        """Gives GPUs that are left to the largest kinds that they are enough for."""
        for kind in sorted(range(len(counts)), key=lambda k: -self.gpus[k]):
            counts[kind] += self._free(counts) // self.gpus[kind]
        return tuple(counts)


def _all_counts(gpus: Sequence[int], num_gpus: int) -> Iterator[tuple[int, ...]]:
    """All counts of at least 1 that leave no GPU to another replica."""
    first, rest = gpus[0], gpus[1:]
    most = (num_gpus - sum(rest)) // first
    if not rest:
        if most >= 1:
            yield (most,)
        return
    for count in range(1, most + 1):
        for others in _all_counts(rest, num_gpus - count * first):
            left = num_gpus - count * first - sum(n * g for n, g in zip(others, rest, strict=True))
            if left < first:
                yield (count, *others)
