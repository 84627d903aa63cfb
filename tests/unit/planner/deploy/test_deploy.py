"""Deployments: kinds, rounds through the dispatcher, and who wins by how much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tlora_megatron.model.deployment import Deployment
from tlora_megatron.model.spec import ModelSpec, read_model_spec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.cost.replica_rate import CurveModel
from tlora_megatron.planner.deploy import MARGIN, DeploymentResult, deploy
from tlora_megatron.planner.deploy_kinds import (
    all_kinds,
    classes_of,
    kinds_by_rows,
    length_classes,
    undominated,
)
from tlora_megatron.planner.hardware import HardwareProfile, load_profile
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

LENGTHS = LengthHistogram.from_counts(
    [(300, 40), (700, 20), (1500, 10), (3000, 6), (7000, 3), (16000, 1)]
)


@pytest.fixture(scope="module")
def spec(repo: Path) -> ModelSpec:
    return read_model_spec(repo / "configs/models/llama-3.1-8b.json")


@pytest.fixture(scope="module")
def l40s(repo: Path) -> HardwareProfile:
    return load_profile(repo / "configs/hardware/l40s.json")


def jobs(count: int = 4, batch_size: int = 32) -> list[JobLoad]:
    return [
        JobLoad(name=str(i), rank=16, batch_size=batch_size, lengths=LENGTHS) for i in range(count)
    ]


@pytest.fixture(scope="module")
def found(spec: ModelSpec, l40s: HardwareProfile) -> DeploymentResult:
    return deploy(spec, jobs(), l40s, 4)


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


def test_a_curve_is_what_the_planner_predicts_for_full_micro_batches(
    spec: ModelSpec, l40s: HardwareProfile
) -> None:
    plan = Plan(tp_size=2, sequence_parallel=True, micro_batch_tokens=8192)
    curve = CurveModel(spec, jobs(), Rates(l40s)).curve(plan)
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
        cost = CostModel(spec, mix, Rates(l40s)).step_cost(plan, load)
        whole = cost.step_time_s - cost.round_s
        assert curve.seconds(8192, 8192.0 * length) == pytest.approx(whole, rel=0.02)
    assert curve.rate.longest == 8192
    assert curve.rate.sequence_ps(1000) == pytest.approx(
        1e12 * (curve.token_s * 1000 + curve.square_s * 1e6), rel=1e-4
    )


def test_a_pipeline_adds_its_largest_micro_batch_for_each_further_stage(
    spec: ModelSpec, l40s: HardwareProfile
) -> None:
    curve = CurveModel(spec, jobs(), Rates(l40s)).curve(Plan(pp_size=2, micro_batch_tokens=4096))
    one = curve.rate.fixed_ps + curve.rate.sequence_ps(1000)
    assert curve.round_ps([[1000], [500]]) == 2 * one + curve.rate.fixed_ps + (
        curve.rate.sequence_ps(500)
    )
    assert curve.round_ps([]) == 0


def test_kinds_that_another_replaces_are_left_out(spec: ModelSpec, l40s: HardwareProfile) -> None:
    kinds = all_kinds(spec, jobs(), l40s, 4, SearchSpace())
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


def test_recompute_by_rows_costs_what_each_length_needs(
    spec: ModelSpec, l40s: HardwareProfile, found: DeploymentResult
) -> None:
    kinds = kinds_by_rows(spec, jobs(), l40s, 1, SearchSpace(tp_size=1, cp_size=1))
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


def test_the_same_question_has_the_same_answer(spec: ModelSpec, l40s: HardwareProfile) -> None:
    assert deploy(spec, jobs(1, 8), l40s, 2) == deploy(spec, jobs(1, 8), l40s, 2)


def test_what_is_fixed_is_kept(spec: ModelSpec, l40s: HardwareProfile) -> None:
    result = deploy(spec, jobs(2, 8), l40s, 4, SearchSpace(tp_size=2, recompute="full"))
    assert result.ranked
    for entry in result.ranked:
        assert {kind.plan.tp_size for kind in entry.replicas.kinds} == {2}
        assert {kind.plan.recompute for kind in entry.replicas.kinds} == {"full"}


def test_block_diagonal_jobs_keep_to_one_tp_size(spec: ModelSpec, l40s: HardwareProfile) -> None:
    blocks = [replace(job, num_blocks=4) for job in jobs(1, 8)]
    for entry in deploy(spec, blocks, l40s, 4).ranked:
        assert entry.deployment.tp_is_alike


def test_no_deployment_where_nothing_holds_the_longest(
    spec: ModelSpec, l40s: HardwareProfile
) -> None:
    long = [replace(job, longest_eval=2**20) for job in jobs(1)]
    result = deploy(spec, long, l40s, 1)
    assert result.ranked == ()
    assert result.best is None
    with pytest.raises(ValueError, match="num_gpus must be at least 1, got 0"):
        deploy(spec, jobs(1), l40s, 0)
