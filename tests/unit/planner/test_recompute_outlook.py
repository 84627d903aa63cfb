"""The predicted gain of recompute by rows, and the line that proposes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.bench.planner.cases import model_spec
from tlora_megatron.cli.plan_ranking import print_recompute
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.hardware import HardwareProfile, load_profile
from tlora_megatron.planner.outlook import saved_by_rows
from tlora_megatron.planner.search import RankedPlan, SearchResult
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

LLAMA_8B = model_spec("8b")
SKEWED = LengthHistogram.from_counts([(512, 300), (2048, 60), (16384, 1)])
JOBS = [JobLoad(name=name, rank=16, batch_size=32, lengths=SKEWED) for name in "ab"]
FULL = Plan(micro_batch_tokens=16384, recompute="full")


@pytest.fixture(scope="module")
def tight(repo: Path) -> HardwareProfile:
    """Holds 16,384 rows under full recompute alone."""
    h200 = load_profile(repo / "configs" / "hardware" / "h200.json")
    return replace(h200, memory_bytes=48e9)


def test_short_sequences_need_none(tight: HardwareProfile, repo: Path) -> None:
    saved = saved_by_rows(LLAMA_8B, JOBS, FULL, tight)
    assert saved is not None
    assert 0.1 < saved < 0.3  # full recompute is a quarter to a third of the work
    long = [replace(job, lengths=LengthHistogram.single(16384)) for job in JOBS]
    assert saved_by_rows(LLAMA_8B, long, FULL, tight) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    "plan",
    [replace(FULL, recompute="none"), replace(FULL, pp_size=2), replace(FULL, tp_size=8)],
    ids=["nothing again", "pipeline", "all fits"],
)
def test_plans_without_a_choice_have_no_outlook(plan: Plan, tight: HardwareProfile) -> None:
    assert saved_by_rows(LLAMA_8B, JOBS, plan, replace(tight, memory_bytes=80e9)) is None


def test_the_best_plan_with_a_gain_is_proposed(tight: HardwareProfile) -> None:
    def printed(*plans: Plan) -> str:
        nothing: Any = None
        result = SearchResult(tuple(RankedPlan(p, nothing, nothing) for p in plans), ())
        console = Console(width=200)
        with console.capture() as capture:
            print_recompute(console, result, LLAMA_8B, JOBS, tight, 10)
        return capture.get()

    line = printed(replace(FULL, pp_size=2), FULL)
    assert line.startswith("plan 2 with run.recompute auto: its rounds would take ")
    assert line.endswith(" less time (docs/rounds.md)\n")
    assert printed(replace(FULL, pp_size=2)) == ""
