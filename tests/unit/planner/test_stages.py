"""Pipelines whose stages are not alike: how they are divided, what they cost, what they need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.planner_case import HARDWARE, SPEC, job, memory_use, step_cost
from tlora_megatron.model.layout import stage_sizes
from tlora_megatron.planner.candidate import (
    EVEN,
    Ends,
    Plan,
    divisions,
    head_layers,
    misfit,
    pipeline_sizes,
)
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.search import search

SIX = replace(SPEC, num_layers=6, vocab_size=10)
"""A head that hardly counts."""


@pytest.mark.parametrize("num_layers", [5, 32, 80, 126])
@pytest.mark.parametrize("head", [0.0, 0.7, 2.4])
def test_no_division_has_a_faster_slowest_stage(num_layers: int, head: float) -> None:
    for pp_size in range(2, min(num_layers, 20)):
        made = divisions(num_layers, pp_size, head)
        if not made:
            continue
        found = min(_slowest(num_layers, pp_size, ends, head) for ends in made)
        every = [
            _slowest(num_layers, pp_size, Ends(first, last), head)
            for first in range(1, num_layers)
            for last in range(1, num_layers - first + 1)
            if _divides(num_layers - first - last, pp_size - 2)
        ]
        assert found == pytest.approx(min(every))
        assert (EVEN in made) == (num_layers % pp_size == 0)


def _divides(layers: int, stages: int) -> bool:
    return layers == 0 if stages == 0 else layers >= stages and layers % stages == 0


def _slowest(num_layers: int, pp_size: int, ends: Ends, head: float) -> float:
    *others, last = stage_sizes(num_layers, pp_size, *ends)
    return max(*others, last + head)


def test_numbers_of_stages_divide_or_have_a_slowest_stage_of_their_own() -> None:
    sizes = pipeline_sizes(126, 0.7, 1024)
    assert {1, 2, 3, 6, 7, 9, 14, 16, 18, 21, 32, 42, 63, 126} <= {*sizes}
    assert len(sizes) < 30
    assert max(pipeline_sizes(126, 0.7, 20)) == 19
    # One product of 100 x 10 beside 14,000 + 10,000 + 40,000 + 20,000 elements.
    assert head_layers(SIX, 0.5) == pytest.approx(500 / 84_000)


def test_the_slowest_stage_gives_the_time() -> None:
    """Both have a stage of four layers that waits for the others: alike in all but its place."""
    plans = [
        Plan(pp_size=2, first_stage_layers=first, micro_batch_tokens=1024) for first in (4, 3, 2)
    ]
    first, even, last = (step_cost(SIX, [job()], plan, HARDWARE) for plan in plans)
    assert even.imbalance_s < first.imbalance_s == pytest.approx(last.imbalance_s, rel=0.05)
    assert first.gemm_s == pytest.approx(even.gemm_s)
    assert even.step_time_s < min(first.step_time_s, last.step_time_s)
    same = step_cost(SIX, [job()], replace(plans[1], first_stage_layers=None), HARDWARE)
    assert even.step_time_s == pytest.approx(same.step_time_s)


def test_memory_is_that_of_the_fullest_stage() -> None:
    base = Plan(pp_size=3, micro_batch_tokens=1024)
    middle = replace(base, first_stage_layers=1, last_stage_layers=1)
    assert memory_use(SIX, [job()], middle, HARDWARE).stage == 1
    assert memory_use(SIX, [job()], base, HARDWARE).stage == 0
    end = replace(base, first_stage_layers=1, last_stage_layers=4)
    assert memory_use(SIX, [job()], end, HARDWARE).stage == 2


def test_layers_that_no_number_of_stages_divides_have_plans() -> None:
    spec = replace(SIX, num_layers=7)
    plans = [p.plan for p in search(spec, [job()], HARDWARE, 2, SearchSpace(pp_size=2)).plans]
    assert {(p.first_stage_layers, p.last_stage_layers, p.vpp_size) for p in plans} == {(4, 3, 1)}
    assert {runner for plan in plans for runner in plan.runs_in} == {"train", "megatron"}
    assert all("PP2 (4-3 layers at its ends)" in plan.label for plan in plans)
    uneven = Plan(pp_size=2, first_stage_layers=4, vpp_size=2)
    assert misfit(spec, uneven) == "virtual stages are of even stages"
