"""LobRA's planner (PVLDB 18(8), 2025) from its formulas, over our predicted times.

What it has: replicas of unlike TP and PP, buckets of padded lengths, a mixed integer program that
deals a step's sequences to types of replicas, and a choice of types by such programs. What it has
not: packing, context parallelism, recompute. HiGHS (scipy) solves the programs in SCIP's place.

Its released planner calls functions that are defined nowhere, so formulas are followed, not code.
A padded sequence costs what ours of that length does, and a full micro-batch its fixed part.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tlora_megatron.planner.deploy.kinds import Kind

BUCKETS = 16
_MULTIPLE = 16
"""Rows that bucket borders are multiples of."""
_WITHIN, _FEWEST = 0.15, 8
"""Deployments whose bound is so near the best one's are solved, and at least so many."""
_MOST = 24
_SOLVER = {"time_limit": 5.0, "mip_rel_gap": 5e-3}


class Bucket(NamedTuple):
    """Sequences that are padded to one length."""

    rows: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealt:
    """A deployment with the time of the step on it."""

    types: tuple[Kind, ...]
    counts: tuple[int, ...]
    time_s: float


def buckets(lengths: Sequence[int], most: int = BUCKETS) -> list[Bucket]:
    """Cuts lengths into at most `most` buckets of least padding, by dynamic programming."""
    counts = sorted(Counter(-(-n // _MULTIPLE) * _MULTIPLE for n in lengths).items())
    before = [0, *itertools.accumulate(count for _, count in counts)]
    best = [[0] + [10**18] * len(counts)]
    cuts = []
    for _ in range(most):
        row, cut = [0], [0]
        for end in range(1, len(counts) + 1):
            border = counts[end - 1][0]
            costs = [best[-1][b] + border * (before[end] - before[b]) for b in range(end)]
            row.append(min(costs))
            cut.append(costs.index(row[-1]))
        best.append(row)
        cuts.append(cut)
    found, end = [], len(counts)
    for cut in reversed(cuts):
        if end:
            found.append(Bucket(counts[end - 1][0], before[end] - before[cut[end]]))
            end = cut[end]
    return found[::-1]


def pool(kinds: Sequence[Kind]) -> list[Kind]:
    """Types to choose from: none that one of at most its GPUs beats in budget and speed a GPU."""
    plain = [k for k in kinds if k.plan.recompute == "none" and k.plan.cp_size == 1]
    plain.sort(key=lambda k: (k.gpus, -k.curve.budget, -_speed(k)))
    kept: list[Kind] = []
    for kind in plain:
        if not any(k.curve.budget >= kind.curve.budget and _speed(k) >= _speed(kind) for k in kept):
            kept.append(kind)
    return sorted(kept, key=lambda k: (k.curve.budget, k.gpus))


def _speed(kind: Kind) -> float:
    rows = kind.curve.budget
    return rows / kind.curve.seconds(rows, float(rows * rows)) / kind.gpus


def plan(kinds: Sequence[Kind], step: Sequence[Bucket], num_gpus: int) -> Dealt | None:
    """Chooses types and counts for a step's buckets; None if no type holds the longest."""
    types = pool(kinds)
    scored = []
    for counts in _multisets([kind.gpus for kind in types], num_gpus):
        used = [(kind, n) for kind, n in zip(types, counts, strict=True) if n]
        if max(kind.curve.budget for kind, _ in used) >= step[-1].rows:
            scored.append((_smallest_that_fits(used, step), len(scored), used))
    scored.sort()
    if not scored:
        return None
    near = [entry for entry in scored if entry[0] <= scored[0][0] * (1 + _WITHIN)]
    chosen = scored[: min(_MOST, max(_FEWEST, len(near)))]
    dealt = (deal([k for k, _ in used], [n for _, n in used], step) for *_, used in chosen)
    return min((d for d in dealt if d is not None), key=lambda d: d.time_s, default=None)


def _multisets(gpus: Sequence[int], left: int) -> Iterator[tuple[int, ...]]:
    """Counts of each type that take exactly `left` GPUs."""
    if len(gpus) == 1:
        if left % gpus[0] == 0:
            yield (left // gpus[0],)
        return
    for count in range(left // gpus[0] + 1):
        for rest in _multisets(gpus[1:], left - count * gpus[0]):
            yield (count, *rest)


def _smallest_that_fits(used: Sequence[tuple[Kind, int]], step: Sequence[Bucket]) -> float:
    """Mean time over GPUs if each bucket goes to the type of least budget that holds it."""
    by_budget = sorted(used, key=lambda pair: pair[0].curve.budget)
    gpus = sum(kind.gpus * n for kind, n in used)
    total = 0.0
    for bucket in step:
        kind = next(k for k, _ in by_budget if k.curve.budget >= bucket.rows)
        total += kind.gpus * bucket.count * sequence_s(kind, bucket.rows)
    return total / gpus


def sequence_s(kind: Kind, rows: int) -> float:
    """Time of a padded sequence in a full micro-batch of its bucket."""
    at_once = max(1, kind.curve.budget // rows)
    curve = kind.curve
    return curve.token_s * rows + curve.square_s * rows * rows + curve.fixed_s / at_once


def deal(types: Sequence[Kind], counts: Sequence[int], step: Sequence[Bucket]) -> Dealt | None:
    """Deals a step to types of replicas by a mixed integer program.

    Whole sequences a replica, every type at least one, a pipeline's filling by its largest
    micro-batch; the time of the longest type is least. With every replica a type of its own, this
    is its dispatch as its launch script asks for it (`--split_scheme`).
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    kinds, classes = len(types), len(step)
    share = kinds * classes  # then whether a bucket is used, the largest micro-batches, the time
    size = 2 * share + kinds + 1
    rows: list[Any] = []
    least, most = [], []

    def add(pairs: dict[int, float], low: float, high: float) -> None:
        row = np.zeros(size)
        for column, value in pairs.items():
            row[column] = value
        rows.append(row)
        least.append(low)
        most.append(high)

    upper = np.full(size, np.inf)
    upper[share : 2 * share] = 1
    for b, bucket in enumerate(step):
        add({k * classes + b: counts[k] for k in range(kinds)}, bucket.count, np.inf)
    for k, kind in enumerate(types):
        add({k * classes + b: 1.0 for b in range(classes)}, 1.0, np.inf)
        seconds = {k * classes + b: sequence_s(kind, q.rows) for b, q in enumerate(step)}
        add({**seconds, 2 * share + k: kind.plan.pp_size - 1.0, size - 1: -1.0}, -np.inf, 0.0)
        for b, bucket in enumerate(step):
            column = k * classes + b
            if bucket.rows > kind.curve.budget:
                upper[column] = 0
                continue
            if kind.plan.pp_size > 1:
                full = min(bucket.count, kind.curve.budget // bucket.rows)
                one = full * sequence_s(kind, bucket.rows)
                add({column: 1.0, share + column: -float(bucket.count)}, -np.inf, 0.0)
                add({share + column: one, 2 * share + k: -1.0}, -np.inf, 0.0)
    goal = np.zeros(size)
    goal[-1] = 1.0
    whole = np.concatenate([np.ones(2 * share), np.zeros(kinds + 1)])
    limits = LinearConstraint(np.array(rows), np.array(least), np.array(most))
    found = milp(
        goal, constraints=limits, bounds=Bounds(0, upper), integrality=whole, options=_SOLVER
    )
    if found.x is None or not math.isfinite(found.fun):
        return None
    return Dealt(types=tuple(types), counts=tuple(counts), time_s=float(found.fun))
