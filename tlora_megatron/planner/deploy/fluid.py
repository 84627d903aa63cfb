"""The time of a deployment if sequences could be divided: a bound, and shares that come near it.

The bound is the dual of a linear program. For prices p of the kinds, no division of the work ends
before `sum over classes of the least p * cost` / `sum over replicas of p`. Prices rise where a kind
has more than its part of the work; the shares are what the prices lead to, averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

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
    """The work divided among replicas."""

    makespan_s: float
    """Time of the kind that ends last."""
    prices: Prices
    """Those of the best bound that was found."""
    shares: tuple[tuple[float, ...], ...]
    """Share of each class that each kind has."""


def divide(costs: Costs, counts: Sequence[int]) -> Division:
    """Divides the work over replicas so that all end at about the same time.

    Args:
        costs: of kinds that together fit every class.
        counts: replicas of each kind, each at least 1.
    """
    best, shares = _search(costs, counts)
    loads = [_dot(own, cost) for own, cost in zip(shares, costs, strict=True)]
    for _ in range(_MOVES):
        if not _move(costs, counts, best.prices, shares, loads):
            break
    makespan = max(load / n for load, n in zip(loads, counts, strict=True))
    return Division(makespan, best, tuple(map(tuple, shares)))


def find_prices(costs: Costs, counts: Sequence[int]) -> Prices:
    """The prices of the best bound that was found."""
    return _search(costs, counts)[0]


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

    It is the move that costs least at the prices. Kinds that end together may have to make way for
    each other, so all of them give.
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
