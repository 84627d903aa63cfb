"""What recompute by rows and context parallelism by micro-batch would save, and where told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from tests.helpers.planner_case import H200, HARDWARE, L40S, LLAMA_8B, SPEC, job
from tlora_megatron.cli.plan_ranking import PlanInputs, print_recompute, print_teams
from tlora_megatron.model.layout import RECOMPUTES, RecomputeTable
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.choices import LEAST_ROWS, recompute_for_rows
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.deploy_sampled import outlook_of_teams, saved_by_rows
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.search import RankedPlan, SearchResult
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

JOBS, LONGER = (
    [
        JobLoad(
            name=name,
            rank=16,
            batch_size=32,
            lengths=LengthHistogram.from_counts([(512, 300), (2048, 60), (longest, 1)]),
        )
        for name in "ab"
    ]
    for longest in (16384, 32768)
)
FULL = Plan(micro_batch_tokens=16384, recompute="full")
TIGHT = replace(H200, memory_bytes=48e9)
"""Holds 16,384 rows under full recompute alone."""


def test_short_sequences_need_none() -> None:
    saved = saved_by_rows(LLAMA_8B, JOBS, FULL, TIGHT)
    assert saved is not None
    assert 0.1 < saved < 0.3  # full recompute is a quarter to a third of the work
    long = [replace(job, lengths=LengthHistogram.single(16384)) for job in JOBS]
    assert saved_by_rows(LLAMA_8B, long, FULL, TIGHT) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    "plan",
    [replace(FULL, recompute="none"), replace(FULL, pp_size=2), replace(FULL, tp_size=8)],
    ids=["nothing again", "pipeline", "all fits"],
)
def test_plans_without_a_choice_have_no_outlook(plan: Plan) -> None:
    assert saved_by_rows(LLAMA_8B, JOBS, plan, replace(TIGHT, memory_bytes=80e9)) is None


def printed(
    show: Callable[..., None],
    jobs: Sequence[JobLoad],
    hardware: HardwareProfile,
    *,
    plans: Sequence[Plan],
) -> str:
    """What the ranking of plans says of those with a gain."""
    nothing: Any = None
    result = SearchResult(tuple(RankedPlan(plan, nothing, nothing) for plan in plans), ())
    console = Console(width=200)
    with console.capture() as capture:
        asked = {"config": nothing, "spec": LLAMA_8B, "jobs": jobs, "hardware": hardware}
        show(console, result, PlanInputs(**asked, num_gpus=8, top=10))
    return capture.get()


def test_the_best_plan_with_a_gain_by_rows_is_proposed() -> None:
    staged = replace(FULL, pp_size=2)
    line = printed(print_recompute, JOBS, TIGHT, plans=(staged, FULL))
    assert line.startswith("plan 2 with run.recompute auto: its rounds would take ")
    assert line.endswith(" less time (docs/rounds.md)\n")
    assert printed(print_recompute, JOBS, TIGHT, plans=(staged,)) == ""


CP4 = Plan(cp_size=4, micro_batch_tokens=32768)


@pytest.mark.parametrize("plan", [Plan(), Plan(cp_size=2, pp_size=2), Plan(cp_size=3)])
def test_plans_that_the_key_is_not_for_have_no_outlook(plan: Plan) -> None:
    assert outlook_of_teams(LLAMA_8B, LONGER, plan, L40S) is None


def test_slow_links_make_it_worth_most() -> None:
    slow, fast = (outlook_of_teams(LLAMA_8B, LONGER, CP4, gpu) for gpu in (L40S, H200))
    assert slow is not None
    assert fast is not None
    assert slow.saved > 0.05
    assert -0.03 < fast.saved < slow.saved


def test_the_best_plan_with_a_gain_by_teams_is_proposed() -> None:
    plans = (Plan(cp_size=2, pp_size=2), CP4)
    line = printed(print_teams, LONGER, L40S, plans=plans)
    assert line.startswith("plan 2 with parallel.cp_by_micro_batch and run.round_depth ")
    without = (Plan(), replace(CP4, cp_size=2, vpp_size=2, pp_size=2))
    assert printed(print_teams, LONGER, L40S, plans=without) == ""


MODEL = MemoryModel(SPEC, [job()], HARDWARE)
PLAN = Plan(micro_batch_tokens=8192)


def bytes_of(recompute: str, rows: int, plan: Plan = PLAN) -> float:
    return MODEL.use(replace(plan, recompute=recompute), rows).total_bytes  # type: ignore[arg-type]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_each_recompute_holds_as_many_rows_as_fit(cp_size: int) -> None:
    plan, step = replace(PLAN, cp_size=cp_size), 128 * cp_size
    budget = bytes_of("selective", 4096, plan)
    table = recompute_for_rows(MODEL, plan, budget)
    (none, few), (selective, some), (full, most) = table.most_rows
    assert (none, selective, full, some) == (*RECOMPUTES, 4096)
    for recompute, rows in table.most_rows[:2]:
        assert bytes_of(recompute, rows, plan) <= budget < bytes_of(recompute, rows + step, plan)
    assert [table.of(rows) for rows in (1, few, few + 1, some, some + 1, most, 10**9)] == [
        none, none, selective, selective, full, full, full
    ]  # fmt: skip


def test_the_lightest_is_all_where_it_fits() -> None:
    table = recompute_for_rows(MODEL, PLAN, 1e12)
    assert table == RecomputeTable((("none", 8192),))
    assert table.line == "none for all micro-batches"


def test_what_fits_too_few_rows_is_left_out() -> None:
    budget = bytes_of("none", LEAST_ROWS - 128)
    assert recompute_for_rows(MODEL, PLAN, budget).most_rows[0][0] == "selective"
    assert recompute_for_rows(MODEL, PLAN, budget, least_rows=128).most_rows[0][0] == "none"
    # Unless no micro-batch has more.
    small = replace(PLAN, micro_batch_tokens=LEAST_ROWS - 128)
    assert recompute_for_rows(MODEL, small, budget).most_rows == (("none", LEAST_ROWS - 128),)


def test_nothing_saves_more_than_full() -> None:
    assert recompute_for_rows(MODEL, PLAN, 0.0).most_rows == (("full", 8192),)
    table = recompute_for_rows(MODEL, PLAN, bytes_of("full", 6400))
    assert table.most_rows[-1] == ("full", 6400)
    assert table.of(8192) == "full"


def test_a_table_is_told_in_a_line() -> None:
    table = RecomputeTable((("none", 6144), ("selective", 12288), ("full", 24576)))
    assert table.line == "none to 6,144 rows, selective to 12,288, full beyond"
    with pytest.raises(ValueError, match="must ascend from 1"):
        RecomputeTable((("none", 128), ("full", 128)))
