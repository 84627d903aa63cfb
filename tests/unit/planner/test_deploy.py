"""Deployments: counts by brute force and linear programs, kinds, rounds, and who wins."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.helpers.planner_case import L40S, LLAMA_8B
from tlora_megatron.model.layout import Deployment
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.choices import CurveModel
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.deploy import MARGIN, DeploymentResult, Problem, best_counts, deploy
from tlora_megatron.planner.deploy_kinds import (
    all_kinds,
    classes_of,
    divide,
    length_classes,
    undominated,
)
from tlora_megatron.planner.layouts import Question, SearchSpace
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad, LengthHistogram


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


LENGTHS = LengthHistogram.from_counts(
    [(300, 40), (700, 20), (1500, 10), (3000, 6), (7000, 3), (16000, 1)]
)


def jobs(count: int = 4, batch_size: int = 32) -> list[JobLoad]:
    return [
        JobLoad(name=str(i), rank=16, batch_size=batch_size, lengths=LENGTHS) for i in range(count)
    ]


@pytest.fixture(scope="module")
def found() -> DeploymentResult:
    return deploy(LLAMA_8B, jobs(), L40S, 4)


def test_classes_hold_all_rows_and_squares() -> None:
    classes = length_classes(jobs())
    assert sum(c.rows for c in classes) == pytest.approx(4 * 32 * LENGTHS.mean)
    squares = LENGTHS.variance + LENGTHS.mean**2
    assert sum(c.squares for c in classes) == pytest.approx(4 * 32 * squares)
    assert [c.longest for c in classes] == sorted({c.longest for c in classes})
    assert classes[-1].longest == 16000


def test_classes_are_cut_where_a_budget_ends() -> None:
    assert [c.longest for c in classes_of([(2000, 1.0), (2100, 1.0), (2**20, 1.0)])] == [
        2000, 2100, 2**20,
    ]  # fmt: skip


def test_a_curve_is_what_the_planner_predicts_for_full_micro_batches() -> None:
    plan = Plan(tp_size=2, sequence_parallel=True, micro_batch_tokens=8192)
    curve = CurveModel(LLAMA_8B, jobs(), L40S).curve(plan)
    for length in (256, 1024, 4096, 8192):
        mix = [replace(job, lengths=LengthHistogram.single(length)) for job in jobs()]
        tokens = 8192.0 / len(mix)
        load = RoundLoad(
            micro_batches=1,
            rows=8192,
            job_tokens=(tokens,) * len(mix),
            job_sequences=(tokens / LENGTHS.mean,) * len(mix),
            steps=(0.0,) * len(mix),
        )
        cost = CostModel(LLAMA_8B, mix, L40S).step_cost(plan, load)
        whole = cost.step_time_s - cost.round_s
        assert curve.seconds(8192, 8192.0 * length) == pytest.approx(whole, rel=0.02)
    assert curve.rate.longest == 8192
    assert curve.rate.sequence_ps(1000) == pytest.approx(
        1e12 * (curve.token_s * 1000 + curve.square_s * 1e6), rel=1e-4
    )


def test_a_pipeline_adds_its_largest_micro_batch_for_each_further_stage() -> None:
    curve = CurveModel(LLAMA_8B, jobs(), L40S).curve(Plan(pp_size=2, micro_batch_tokens=4096))
    one = curve.rate.fixed_ps + curve.rate.sequence_ps(1000)
    assert curve.round_ps([[1000], [500]]) == 2 * one + curve.rate.fixed_ps + (
        curve.rate.sequence_ps(500)
    )
    assert curve.round_ps([]) == 0


def test_kinds_that_another_replaces_are_left_out() -> None:
    kinds, _ = all_kinds(Question(LLAMA_8B, jobs(), L40S, 4))
    classes = length_classes(jobs())
    kept = undominated(kinds, classes)
    assert 1 < len(kept) < len(kinds)
    for kind in kinds:
        own = [kind.gpus * s for s in kind.seconds(classes)]
        assert any(
            other.gpus <= kind.gpus
            and all(other.gpus * s <= o for s, o in zip(other.seconds(classes), own, strict=True))
            for other in kept
        )


def test_recompute_by_rows_costs_what_each_length_needs(found: DeploymentResult) -> None:
    _, kinds = all_kinds(Question(LLAMA_8B, jobs(), L40S, 1, SearchSpace(tp_size=1, cp_size=1)))
    assert [len(kind.by_rows) > 1 for kind in kinds] == [True]
    kind, classes = kinds[0], length_classes(jobs())
    assert [each.plan.recompute for each in kind.by_rows][-1] == kind.plan.recompute
    for own, whole in zip(classes, kind.seconds(classes), strict=True):
        fitting = [k for k in kind.by_rows if own.longest <= k.curve.budget]
        assert whole == min(k.seconds([own])[0] for k in fitting)
    heavy = kind.curve.round_ps([[300] * 4, [16000]])
    assert kind.round_ps([300] * 4 + [16000]) < heavy
    by_rows = [entry for entry in found.ranked if entry.has_recompute_by_rows]
    assert by_rows
    assert all(entry.is_alike and "/auto" in entry.label for entry in by_rows)


def test_deployments_use_all_gpus_and_hold_the_longest(found: DeploymentResult) -> None:
    assert {entry.is_alike for entry in found.ranked} == {True, False}
    for entry in found.ranked:
        assert entry.deployment.world_size == 4
        assert entry.deployment.longest(0) >= 16000
        assert Deployment.parse(str(entry.deployment)) == entry.deployment
        assert entry.gap >= 0
        assert entry.fluid_s >= found.bound_s
        assert entry.sampled is not None
        assert 0 < entry.sampled.busy_share <= 1
        assert entry.time_s == pytest.approx(entry.fluid_s / entry.sampled.efficiency)


def test_unlike_replicas_must_win_by_the_margin(found: DeploymentResult) -> None:
    best = found.best
    assert best is not None
    alike = min(entry.time_s for entry in found.ranked if entry.is_alike)
    unlike = min(entry.time_s for entry in found.ranked if not entry.is_alike)
    assert best.is_alike == (unlike > alike * (1 - MARGIN))
    assert best.time_s == (alike if best.is_alike else unlike)


def test_what_is_fixed_is_kept() -> None:
    result = deploy(LLAMA_8B, jobs(2, 8), L40S, 4, SearchSpace(tp_size=2, recompute="full"))
    assert result.ranked
    for entry in result.ranked:
        assert {kind.plan.tp_size for kind in entry.replicas.kinds} == {2}
        assert {kind.plan.recompute for kind in entry.replicas.kinds} == {"full"}


def test_block_diagonal_jobs_keep_to_one_tp_size() -> None:
    blocks = [replace(job, num_blocks=4) for job in jobs(1, 8)]
    for entry in deploy(LLAMA_8B, blocks, L40S, 4).ranked:
        assert entry.deployment.tp_is_alike


def test_none_where_nothing_holds_the_longest() -> None:
    long = [replace(job, longest_eval=2**20) for job in jobs(1)]
    result = deploy(LLAMA_8B, long, L40S, 1)
    assert result.ranked == ()
    assert result.best is None
    with pytest.raises(ValueError, match="num_gpus must be at least 1, got 0"):
        deploy(LLAMA_8B, jobs(1), L40S, 0)
