"""Plans that leave GPUs idle: found where they are as fast, and by a bound that hides none."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.helpers.planner_case import HARDWARE, SPEC, job
from tlora_megatron.cli.plan_ranking import print_idle, thriftiest
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.fit import Drops, Fit, SpeedBound, expected_longest
from tlora_megatron.planner.layouts import Question, SearchSpace
from tlora_megatron.planner.search import SearchResult, search
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

LENGTHS = LengthHistogram.from_counts([(64, 3), (128, 2), (512, 1)])
TRAIN = SearchSpace(runs_in="train")


def test_a_prime_number_of_gpus_is_not_all_used_if_fewer_are_as_fast() -> None:
    alone = [job(lengths=LengthHistogram.single(512))]
    slow = replace(HARDWARE, intra_node=replace(HARDWARE.intra_node, bytes_per_s=1e6))
    exact = search(SPEC, alone, slow, 7, TRAIN)
    result = search(SPEC, alone, slow, 7, TRAIN, may_idle=True)
    assert {p.plan.num_gpus for p in exact.plans} == {7}
    assert result.best is not None
    assert result.best.plan.num_gpus < 7
    assert {*exact.plans} <= {*result.plans}
    assert result.dropped == exact.dropped
    told = _told(result, alone, 7)
    used = thriftiest(result)[1].plan.num_gpus
    assert f"plan 1 uses {result.best.plan.num_gpus} of 7 GPUs and leaves" in told
    assert f"more than {used} of 7 GPUs hardly help with 1 sequences in all batches" in told


def _told(result: SearchResult, jobs: list[JobLoad], num_gpus: int) -> str:
    out = io.StringIO()
    print_idle(Console(file=out, width=500), result, jobs, num_gpus)
    return out.getvalue()


def test_nothing_is_told_where_all_gpus_are_of_use() -> None:
    jobs = [job(f"job{i}", batch_size=64, lengths=LENGTHS) for i in range(4)]
    assert _told(search(SPEC, jobs, HARDWARE, 4, TRAIN, may_idle=True), jobs, 4) == ""


_MIX = st.lists(
    st.tuples(st.sampled_from((4, 16, 64)), st.sampled_from((1, 3, 16)), st.booleans()),
    min_size=1,
    max_size=4,
)


@settings(max_examples=8, deadline=None)
@given(mix=_MIX, num_gpus=st.sampled_from((4, 11, 24)), runs_in=st.sampled_from(("train", None)))
def test_no_plan_is_faster_than_the_bound_of_its_layout(
    mix: list[tuple[int, int, bool]], num_gpus: int, runs_in: str | None
) -> None:
    jobs = [
        job(
            f"job{i}",
            rank=rank,
            batch_size=batch,
            lengths=LENGTHS if is_mixed else LengthHistogram.single(256),
        )
        for i, (rank, batch, is_mixed) in enumerate(mix)
    ]
    space = SearchSpace(runs_in=runs_in)  # type: ignore[arg-type]
    model = CostModel(SPEC, jobs, HARDWARE)
    fit = Fit(Question(SPEC, jobs, HARDWARE, 1, space), Drops(), model.rounds)
    bound = SpeedBound(model, is_full=space.wants("megatron"))
    layouts = list(fit.layouts.on_fewer(num_gpus))[:: 1 if num_gpus < 20 else 5]
    speeds = []
    for most, layout in fit.by_bound(layouts, bound):
        speeds.append(most)
        for plan, _ in fit.lightest(layout):
            found = model.step_cost(model.fastest_split(plan)).tokens_per_s
            assert found <= most
            assert found <= model.most_tokens_per_s(plan)
    assert speeds == sorted(speeds, reverse=True)


def test_the_longest_sequence_of_many_is_long() -> None:
    assert expected_longest([job(lengths=LengthHistogram.single(512))]) == pytest.approx(512)
    many = [job(f"job{i}", batch_size=64, lengths=LENGTHS) for i in range(4)]
    assert 490 < expected_longest(many) < 512.01
    mean = LENGTHS.mean
    assert 0.9 * mean < expected_longest([job(lengths=LENGTHS)]) <= 1.001 * mean
