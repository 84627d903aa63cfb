"""Nano-batches in the planner: what they hide, what they cost, and what a plan's files ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.planner_case import HARDWARE, SPEC, job, step_cost
from tlora_megatron.cli.main import main
from tlora_megatron.config.load import load_config
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.step_terms import exposed_share, fastest_split
from tlora_megatron.planner.hardware import HardwareProfile, HostCost, Link
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.search import GroupModel, search
from tlora_megatron.planner.workload import LengthHistogram
from tlora_megatron.runtime.planning.plan_files import apply_plan, overrides_of

TWO_PARTS = Plan(tp_size=2, num_nano_batches=2, micro_batch_tokens=1024)
MIX = [job(f"job{i}", batch_size=2) for i in range(4)]
"""Eight sequences of 128 tokens."""


SLOW_LINK = Link(bytes_per_s=1e7, latency_s=0.0)


def machine(share: float, **changes: object) -> HardwareProfile:
    fixed = {"nano_overlap": share, "intra_node": SLOW_LINK}
    return replace(HARDWARE, **fixed | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "compute_s", "comm_s", "share", "exposed"),
    [
        (2, 10.0, 4.0, 0.6, 0.4),
        (1, 10.0, 4.0, 0.6, 1.0),  # nobody else computes
        (2, 2.0, 4.0, 0.6, 0.75),  # half of the compute, 1.0, is all there is to hide behind
        (4, 2.0, 4.0, 0.6, 0.625),
        (2, 10.0, 0.0, 0.6, 1.0),
    ],
)
def test_what_is_left_to_wait_for(
    parts: int, compute_s: float, comm_s: float, share: float, exposed: float
) -> None:
    assert exposed_share(parts, compute_s, comm_s, share) == pytest.approx(exposed)


def test_two_nano_batches_hide_the_profiles_share_and_pay_for_their_padding() -> None:
    hardware = machine(0.6)
    one = step_cost(SPEC, MIX, replace(TWO_PARTS, num_nano_batches=1), hardware)
    two = step_cost(SPEC, MIX, TWO_PARTS, hardware)
    padded = (1024 + 64) / 1024
    assert two.gemm_s == pytest.approx(one.gemm_s * padded)
    # An all-reduce each way of both blocks: half of the bytes each of two ranks sends, twice.
    comm = 4 * 4 * (1024 * padded * 100 * 2) / 1e7
    assert two.tp_comm_s == pytest.approx(0.4 * comm)
    assert two.step_time_s < one.step_time_s


def test_every_nano_batch_has_launches_and_fixed_costs_of_its_own() -> None:
    busy = machine(0.6, host=HostCost(layer_s=1e4, round_s=0.0, job_step_s=0.0))
    one = step_cost(SPEC, MIX, replace(TWO_PARTS, num_nano_batches=1), busy)
    two = step_cost(SPEC, MIX, TWO_PARTS, busy)
    assert two.step_time_s == pytest.approx(2 * one.step_time_s, rel=1e-3)
    fixed = replace(HARDWARE.lora, forward_fixed_s=1.0, backward_fixed_s=2.0)
    once = step_cost(SPEC, MIX, replace(TWO_PARTS, num_nano_batches=1), machine(0.6, lora=fixed))
    twice = step_cost(SPEC, MIX, TWO_PARTS, machine(0.6, lora=fixed))
    assert twice.lora_s - once.lora_s == pytest.approx(4 * 3.0)


@pytest.mark.parametrize(
    ("plan", "jobs"),
    [
        (replace(TWO_PARTS, tp_size=1), MIX),
        (replace(TWO_PARTS, cp_size=2), MIX),
        (TWO_PARTS, [job(lengths=LengthHistogram.single(1024))]),  # one sequence
    ],
)
def test_what_is_not_cut_costs_the_same(plan: Plan, jobs: list) -> None:
    hardware = machine(0.6)
    whole = step_cost(SPEC, jobs, replace(plan, num_nano_batches=1), hardware)
    assert step_cost(SPEC, jobs, plan, hardware) == whole


def test_more_parts_as_long_as_that_helps() -> None:
    times = {1: 5.0, 2: 4.0, 3: 3.0, 4: 3.5}
    best = fastest_split(Plan(tp_size=2), lambda plan: times[plan.num_nano_batches])
    assert best.num_nano_batches == 3
    times[2] = 5.0
    assert fastest_split(Plan(tp_size=2), lambda p: times[p.num_nano_batches]) == Plan(tp_size=2)


def test_an_unmeasured_profile_counts_on_nothing() -> None:
    assert HARDWARE.nano_overlap == 0.0
    assert {p.plan.num_nano_batches for p in search(SPEC, MIX, HARDWARE, 2).plans} == {1}


def test_the_search_takes_the_fastest_count_of_each_plan() -> None:
    plans = search(SPEC, MIX, machine(0.6), 2).plans
    cut = [p for p in plans if p.plan.tp_size == 2]
    assert {p.plan.num_nano_batches for p in plans if p.plan.tp_size == 1} == {1}
    assert max(p.plan.num_nano_batches for p in cut) > 1
    for ranked in cut:
        whole = replace(ranked.plan, num_nano_batches=1)
        assert ranked.cost.step_time_s <= step_cost(SPEC, MIX, whole, machine(0.6)).step_time_s
        assert ("deepspeed" in ranked.plan.runs_in) <= (ranked.plan.num_nano_batches == 1)
    deepspeed = search(SPEC, MIX, machine(0.6), 2, SearchSpace(runs_in="deepspeed", tp_size=2))
    assert {p.plan.num_nano_batches for p in deepspeed.plans} == {1}


@settings(max_examples=25, deadline=None)
@given(
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    bandwidth=st.floats(1e6, 1e10),
    latency=st.floats(0, 1e-3),
)
def test_a_larger_share_never_makes_a_plan_slower(
    shares: tuple[float, float], bandwidth: float, latency: float
) -> None:
    link = Link(bytes_per_s=bandwidth, latency_s=latency)
    less, more = (machine(share, intra_node=link) for share in sorted(shares))
    slow, fast = (search(SPEC, MIX, hardware, 2).best for hardware in (less, more))
    assert slow is not None
    assert fast is not None
    assert fast.cost.tokens_per_s >= slow.cost.tokens_per_s * (1 - 5e-3)  # ranked to three digits
    groups = [GroupModel(SPEC, hardware).estimate(MIX, 2) for hardware in (less, more)]
    assert groups[1].step_time_s <= groups[0].step_time_s * (1 + 1e-9)


@pytest.fixture
def config(repo: Path) -> RunConfig:
    return load_config(repo / "configs/quickstart.yaml")


def test_files_ask_for_a_choice_while_training(config: RunConfig) -> None:
    assert apply_plan(config, Plan(tp_size=2)).run.nano_batches == "auto"
    assert apply_plan(config, Plan(dp_size=2)).run.nano_batches == 1
    asked = replace(config, run=replace(config.run, nano_batches=3))
    assert apply_plan(asked, Plan(tp_size=2)).run.nano_batches == 3
    assert "run.nano_batches=auto" in overrides_of(config, Plan(tp_size=2))
    assert "run.nano_batches=3" in overrides_of(asked, Plan(tp_size=2))


@pytest.mark.parametrize(("tp", "run"), [("2", {"nano_batches": "auto"}), ("1", None)])
def test_megatrons_jobs_file_holds_it(
    repo: Path, tmp_path: Path, tp: str, run: dict[str, str] | None
) -> None:
    path = tmp_path / "run.sh"
    argv = ["plan", str(repo / "configs/quickstart.yaml"), "--gpus", "2", "--hardware", "h200"]
    assert main([*argv, "--lengths", "64", "--tp", tp, "--write", "megatron", str(path)]) == 0
    assert yaml.safe_load((tmp_path / "run.jobs.yaml").read_text()).get("run") == run
