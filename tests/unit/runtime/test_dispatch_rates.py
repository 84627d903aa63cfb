"""Speeds of replicas from the model's shape, and from the planner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.layout_sites import SPEC
from tlora_megatron.model.backbone import LinearShape, LinearsSpec
from tlora_megatron.model.deployment import ReplicaLayout
from tlora_megatron.model.layout import RECOMPUTES, RecomputeTable
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.replica_rate import replica_rate
from tlora_megatron.planner.hardware import load_profile
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.runtime.own_replica import rate_of_shape, rate_of_team, teams_of

LLAMA_8B = ModelSpec(
    model_type="llama", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8,
    head_dim=128, ffn_size=14336, vocab_size=128256, max_positions=131072, norm_eps=1e-5,
    rope_theta=5e5,
)  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("machine", ["h200", "h100", "l40s"])
def test_the_shape_says_what_profiles_say(recompute: str, machine: str, repo: Path) -> None:
    """Among alike replicas only the share of attention counts."""
    lengths = LengthHistogram.from_counts([(300, 10), (2000, 4), (16384, 1)])
    job = JobLoad(name="a", rank=16, batch_size=64, lengths=lengths)
    plan = Plan(micro_batch_tokens=16384, recompute=recompute)  # type: ignore[arg-type]
    profile = load_profile(repo / f"configs/hardware/{machine}.json")
    measured = replica_rate(LLAMA_8B, [job], plan, profile)
    counted = rate_of_shape(
        LLAMA_8B,
        ReplicaLayout(micro_batch_tokens=16384, recompute=recompute),  # type: ignore[arg-type]
    )
    ratio = (counted.square_ps / counted.token_ps) / (measured.square_ps / measured.token_ps)
    assert ratio == pytest.approx(1, abs=0.12)
    assert measured.longest == counted.longest == 16384


def test_ranks_share_the_work_and_recompute_adds_to_it() -> None:
    alone = rate_of_shape(LLAMA_8B, ReplicaLayout())
    shared = rate_of_shape(LLAMA_8B, ReplicaLayout(tp_size=2, cp_size=2))
    again = rate_of_shape(LLAMA_8B, ReplicaLayout(recompute="full"))
    assert shared.token_ps == pytest.approx(alone.token_ps / 4, abs=1)
    assert again.token_ps == pytest.approx(1.5 * alone.token_ps, abs=1)
    assert again.square_ps == pytest.approx(4.5 / 3.5 * alone.square_ps, abs=1)


def test_a_model_of_linears_counts_by_its_linears() -> None:
    names = {"q_proj": 64, "up_proj": 128}
    linears = tuple(
        LinearShape(target=name, path=name, out_size=size, in_size=64)
        for name, size in names.items()
    )
    spec = LinearsSpec(num_layers=100, vocab_size=8, max_positions=8, linears=linears)
    rate = rate_of_shape(spec, ReplicaLayout())
    assert rate.token_ps == 2 * 192 * 64 * 2 * 100 // 400
    assert rate.square_ps > 0
    other = LinearsSpec(num_layers=1, vocab_size=8, max_positions=8, linears=linears[1:])
    assert rate_of_shape(other, ReplicaLayout()).square_ps == 0


def test_teams_have_their_share_of_rows_and_pay_for_what_they_exchange(repo: Path) -> None:
    """Short sequences cost more together than alone, by the shape and by the planner."""
    whole = ReplicaLayout(cp_size=4, micro_batch_tokens=65536, recompute="full")
    teams = teams_of(whole)
    assert [team.cp_size for team in teams] == [1, 2, 4]
    assert teams[-1] == whole
    profile = load_profile(repo / "configs" / "hardware" / "h200.json")
    lengths = LengthHistogram.from_counts([(512, 9), (65536, 1)])
    job = JobLoad(name="one", rank=16, batch_size=8, lengths=lengths)
    planned = [
        Plan(cp_size=team.cp_size, micro_batch_tokens=team.micro_batch_tokens, recompute="full")  # type: ignore[arg-type]
        for team in teams
    ]
    by_planner = [replica_rate(LLAMA_8B, [job], plan, profile) for plan in planned]
    for rates in ([rate_of_team(LLAMA_8B, team) for team in teams], by_planner):
        assert [rate.longest for rate in rates] == [16384, 32768, 65536]
        work = [
            rate.sequence_ps(512) * team.cp_size for rate, team in zip(rates, teams, strict=True)
        ]
        assert work == sorted(work)
        assert work[0] < work[-1] < 1.5 * work[0]


def test_tiny_models_have_a_speed() -> None:
    assert rate_of_shape(SPEC, ReplicaLayout(tp_size=2)).token_ps >= 1


def test_long_sequences_cost_the_recompute_that_they_need(repo: Path) -> None:
    profile = load_profile(repo / "configs" / "hardware" / "h200.json")
    lengths = LengthHistogram.from_counts([(512, 9), (16384, 1)])
    job = JobLoad(name="one", rank=16, batch_size=8, lengths=lengths)
    table = RecomputeTable((("none", 4096), ("full", 16384)))
    plans = [Plan(micro_batch_tokens=16384, recompute=recompute) for recompute in RECOMPUTES]
    none, _, full = (replica_rate(LLAMA_8B, [job], plan, profile) for plan in plans)
    found = replica_rate(LLAMA_8B, [job], plans[0], profile, table)
    assert found.sequence_ps(1024) == pytest.approx(none.sequence_ps(1024), rel=0.06)
    assert found.sequence_ps(16384) == pytest.approx(full.sequence_ps(16384), rel=0.02)
