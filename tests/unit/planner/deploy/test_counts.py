"""The solver of deployments against brute force and an exact linear program."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from tlora_megatron.planner.deploy import Problem, best_counts
from tlora_megatron.planner.deploy_kinds import divide


def problem(seed: int, num_gpus: int, kinds: int = 5, classes: int = 6) -> Problem:
    """Kinds of 1 to 8 GPUs: the larger ones hold longer classes and cost more a GPU."""
    draw = random.Random(seed)
    gpus = [*sorted(draw.choice((1, 2, 4)) for _ in range(kinds - 1)), min(num_gpus, 4)]
    costs = []
    for number, size in enumerate(gpus):
        held = classes if number == kinds - 1 else draw.randint(1, classes)
        price = 1 + 0.1 * number + 0.1 * draw.random()
        costs.append(
            tuple(
                draw.uniform(0.9, 1.1) * price * (1 + 0.2 * c) / size if c < held else math.inf
                for c in range(classes)
            )
        )
    return Problem(gpus=tuple(gpus), costs=tuple(costs), num_gpus=num_gpus)


def brute_force(given: Problem) -> float:
    """The least time of all counts of at most four kinds."""
    ranges = [range(given.num_gpus // g + 1) for g in given.gpus]
    best = math.inf
    for counts in itertools.product(*ranges):
        used = sum(n * g for n, g in zip(counts, given.gpus, strict=True))
        kinds = [k for k, n in enumerate(counts) if n]
        if used > given.num_gpus or not 1 <= len(kinds) <= 4:
            continue
        costs = [given.costs[k] for k in kinds]
        if all(min(own) < math.inf for own in zip(*costs, strict=True)):
            best = min(best, divide(costs, [counts[k] for k in kinds]).makespan_s)
    return best


@pytest.mark.parametrize("num_gpus", [4, 6, 8])
def test_counts_are_those_of_brute_force(num_gpus: int) -> None:
    for seed in range(4):
        given = problem(seed, num_gpus)
        found = best_counts(given)
        assert found == sorted(found)
        assert found[0].makespan_s <= brute_force(given) * 1.0011
        assert given.bound_s <= found[0].makespan_s
        for entry in found:
            used = sum(given.gpus[k] * n for k, n in zip(entry.kinds, entry.counts, strict=True))
            assert used <= num_gpus


def test_a_thousand_gpus_are_divided_near_the_bound() -> None:
    found = best_counts(problem(1, 1024, kinds=12, classes=20))
    assert found[0].makespan_s <= problem(1, 1024, kinds=12, classes=20).bound_s * 1.02


def test_nothing_is_found_where_a_class_fits_no_kind() -> None:
    given = Problem(gpus=(1,), costs=((1.0, math.inf),), num_gpus=4)
    assert given.bound_s == math.inf
    assert best_counts(given) == []


def exact(costs: Sequence[Sequence[float]], counts: Sequence[int]) -> float:
    """The makespan of the linear program, by HiGHS."""
    linprog = pytest.importorskip("scipy.optimize").linprog
    kinds, classes = len(costs), len(costs[0])
    size = kinds * classes + 1
    ends, whole, limits = [[0.0] * size for _ in costs], [[0.0] * size for _ in range(classes)], []
    for kind, own in enumerate(costs):
        ends[kind][-1] = -1.0
        for place, seconds in enumerate(own):
            fits = seconds < math.inf
            ends[kind][kind * classes + place] = seconds / counts[kind] if fits else 0.0
            whole[place][kind * classes + place] = 1.0
            limits.append((0.0, 1.0 if fits else 0.0))
    found = linprog(
        [0.0] * (size - 1) + [1.0],
        A_ub=ends,
        b_ub=[0.0] * kinds,
        A_eq=whole,
        b_eq=[1.0] * classes,
        bounds=[*limits, (0.0, None)],
    )
    return float(found.fun)


def test_work_is_divided_as_a_linear_program_does() -> None:
    draw = random.Random(0)
    for seed in range(30):
        given = problem(seed, 8, kinds=draw.choice((2, 3, 4)), classes=draw.choice((6, 16)))
        counts = [draw.randint(1, 6) for _ in given.gpus]
        division = divide(given.costs, counts)
        best = exact(given.costs, counts)
        assert division.prices.bound_s(counts) <= best * (1 + 1e-9)
        assert best * (1 - 1e-9) <= division.makespan_s <= best * 1.005


def test_shares_are_whole_and_give_the_makespan() -> None:
    given = problem(3, 8, kinds=4)
    counts = [1, 2, 1, 2]
    division = divide(given.costs, counts)
    assert all(sum(own) == pytest.approx(1) for own in zip(*division.shares, strict=True))
    ends = [
        sum(share * s for share, s in zip(shares, own, strict=True) if share) / count
        for shares, own, count in zip(division.shares, given.costs, counts, strict=True)
    ]
    assert max(ends) == pytest.approx(division.makespan_s)
    assert division.prices.bound_s(counts) <= division.makespan_s
