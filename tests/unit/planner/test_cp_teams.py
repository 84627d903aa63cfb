"""The predicted gain of CP by micro-batch, and the line that proposes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.bench.planner.cases import model_spec
from tlora_megatron.cli.plan_ranking import print_teams
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.hardware import HardwareProfile, load_profile
from tlora_megatron.planner.outlook import outlook_of_teams
from tlora_megatron.planner.search import RankedPlan, SearchResult
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

LLAMA_8B = model_spec("8b")
TAIL = LengthHistogram.from_counts([(512, 300), (2048, 60), (32768, 1)])
JOBS = [JobLoad(name=name, rank=16, batch_size=32, lengths=TAIL) for name in "ab"]
CP4 = Plan(cp_size=4, micro_batch_tokens=32768)


@pytest.fixture(scope="module")
def l40s(repo: Path) -> HardwareProfile:
    return load_profile(repo / "configs" / "hardware" / "l40s.json")


@pytest.mark.parametrize("plan", [Plan(), Plan(cp_size=2, pp_size=2), Plan(cp_size=3)])
def test_plans_that_the_key_is_not_for_have_no_outlook(plan: Plan, l40s: HardwareProfile) -> None:
    assert outlook_of_teams(LLAMA_8B, JOBS, plan, l40s) is None


def test_slow_links_make_it_worth_most(l40s: HardwareProfile, repo: Path) -> None:
    h200 = load_profile(repo / "configs" / "hardware" / "h200.json")
    slow, fast = (outlook_of_teams(LLAMA_8B, JOBS, CP4, gpu) for gpu in (l40s, h200))
    assert slow is not None
    assert fast is not None
    assert slow.saved > 0.05
    assert -0.03 < fast.saved < slow.saved


def test_the_best_plan_with_a_gain_is_proposed(l40s: HardwareProfile) -> None:
    def printed(*plans: Plan) -> str:
        nothing: Any = None
        result = SearchResult(tuple(RankedPlan(p, nothing, nothing) for p in plans), ())
        console = Console(width=200)
        with console.capture() as capture:
            print_teams(console, result, LLAMA_8B, JOBS, l40s, 10)
        return capture.get()

    line = printed(Plan(cp_size=2, pp_size=2), CP4)
    assert line.startswith("plan 2 with parallel.cp_by_micro_batch and run.round_depth ")
    assert printed(Plan(), replace(CP4, cp_size=2, vpp_size=2, pp_size=2)) == ""
