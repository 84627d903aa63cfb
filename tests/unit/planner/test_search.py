"""The search: complete, ranked, explained, thrifty; monotone in memory and links."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.planner_case import (
    H200,
    HARDWARE,
    LARGE,
    LLAMA_8B,
    SPEC,
    job,
    memory_use,
    shipped,
    step_cost,
)
from tlora_megatron.config.job import HF_TARGETS
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunConfig, RunSpec
from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.planner.advice import advise
from tlora_megatron.planner.candidate import Plan, misfit
from tlora_megatron.planner.choices import handicap
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.hardware import HardwareProfile, Link
from tlora_megatron.planner.layouts import Question, SearchSpace
from tlora_megatron.planner.search import GroupModel, search
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.runtime.planning.plan_files import apply_plan

LENGTHS = LengthHistogram.from_counts([(64, 3), (128, 2), (512, 1)])


def jobs(count: int, batch_size: int = 4) -> list[JobLoad]:
    return [
        job(f"job{i}", rank=(4, 16, 64)[i % 3], batch_size=batch_size, lengths=LENGTHS)
        for i in range(count)
    ]


def test_every_layout_of_four_gpus_is_looked_at() -> None:
    result = search(SPEC, jobs(4), HARDWARE, 4)
    found = {(p.plan.tp_size, p.plan.pp_size, p.plan.cp_size, p.plan.dp_size) for p in result.plans}
    # Ten heads: TP 4 does not divide them. Four layers: PP up to 4.
    expected = {
        (tp, pp, cp, 4 // (tp * pp * cp))
        for tp in (1, 2)
        for pp in (1, 2, 4)
        for cp in (1, 2, 4)
        if 4 % (tp * pp * cp) == 0
    }
    assert found == expected
    assert {p.plan.vpp_size for p in result.plans if p.plan.pp_size == 2} == {1, 2}
    assert {p.plan.recompute for p in result.plans} == {"none", "selective", "full"}
    assert {p.plan.sequence_parallel for p in result.plans if p.plan.tp_size == 2} == {False, True}
    reasons = {d.reason: d.count for d in result.dropped}
    assert reasons == {"num_heads 10 is no multiple of TP 4": 2}


def test_no_layout_cuts_blocks_of_fp8_scales() -> None:
    shape = replace(SPEC, num_heads=8, num_kv_heads=8, head_dim=128, ffn_size=3 * 256)
    spec = replace(shape, fp8_linears=(("linear_qkv", 4), ("linear_fc2", 4)), fp8_in_blocks=True)
    misfits = {tp: misfit(spec, plan_of(tp)) for tp in (1, 2, 4)}
    cut = "intermediate_size / tp_size 192 is no multiple of 128, a block of FP8 scales"
    assert misfits == {1: None, 2: None, 4: cut}
    assert misfit(replace(spec, fp8_in_blocks=False), plan_of(4)) is None


def test_an_fp8_base_has_no_virtual_stages() -> None:
    """They are Megatron-LM's, which refuses it."""
    staged = replace(plan_of(1), pp_size=2, vpp_size=2)
    assert misfit(SPEC, staged) is None
    reason = misfit(replace(SPEC, fp8_linears=(("linear_qkv", 4),)), staged)
    assert reason == "virtual stages are Megatron-LM's, which has no base in FP8"


def plan_of(tp_size: int) -> Plan:
    return Plan(tp_size=tp_size, micro_batch_tokens=1024)


@pytest.mark.parametrize("asked", [None, "rank_exchange"])
def test_plans_of_a_deterministic_run_are_those_that_it_does_not_refuse(
    asked: LoraSharding | None,
) -> None:
    free = SearchSpace(runs_in="train", lora_sharding=asked)
    space = replace(free, deterministic=True)
    found = (search(SPEC, jobs(4), HARDWARE, 8, within).plans for within in (free, space))
    plans, kept = ([p.plan for p in each if p.plan.round_depth == 1] for each in found)
    assert kept == [plan for plan in plans if is_taken(plan)]
    assert 0 < len(kept) < len(plans)


def test_deterministic_plans_for_deepspeed_have_no_autotp() -> None:
    for deterministic in (None, True):
        space = SearchSpace(runs_in="deepspeed", deterministic=deterministic)
        sizes = {p.plan.tp_size for p in search(SPEC, jobs(4), HARDWARE, 8, space).plans}
        assert sizes == ({1} if deterministic else {1, 2})


def test_micro_batches_hold_the_largest_portion() -> None:
    tokens = [
        {p.plan.micro_batch_tokens for p in search(SPEC, jobs(4), HARDWARE, 2, space).plans}
        for space in (SearchSpace(), SearchSpace(largest_portion=3000))
    ]
    assert min(tokens[0]) < 3000 <= min(tokens[1])


def is_taken(plan: Plan) -> bool:
    config = RunConfig(
        base_model=BaseModelSpec(path="base"),
        parallel=ParallelSpec(),
        run=RunSpec(output_dir="out", deterministic=True),
        jobs=(),
    )
    try:
        return bool(apply_plan(config, plan))
    except ConfigError:
        return False


def test_plans_are_ranked_by_speed_and_carry_their_own_figures() -> None:
    result = search(SPEC, jobs(4), HARDWARE, 2)
    rates = [p.cost.tokens_per_s * handicap(p.plan.lora_sharding) for p in result.plans]
    assert all(a > b * 0.99 for a, b in itertools.pairwise(rates))
    for ranked in result.plans[::5]:  # not of another plan that it shares some with
        assert ranked.cost == step_cost(SPEC, jobs(4), ranked.plan, HARDWARE)
        assert ranked.memory == memory_use(SPEC, jobs(4), ranked.plan, HARDWARE)


def test_a_slow_link_is_no_place_for_tensor_parallelism_and_one_sequence_is() -> None:
    slow = replace(HARDWARE, intra_node=Link(bytes_per_s=1e6, latency_s=1e-3))
    best = search(SPEC, jobs(8), slow, 2).best
    assert best is not None
    assert (best.plan.dp_size, best.plan.tp_size) == (2, 1)
    # One sequence cannot be shared by data-parallel ranks.
    alone = search(SPEC, [job(lengths=LengthHistogram.single(512))], HARDWARE, 2).best
    assert alone is not None
    assert alone.plan.dp_size == 1


def test_virtual_stages_are_for_megatron_only() -> None:
    result = search(SPEC, jobs(4), HARDWARE, 2, SearchSpace(runs_in="train"))
    assert {p.plan.vpp_size for p in result.plans} == {1}
    assert Plan(pp_size=2, vpp_size=2).runs_in == ("megatron",)
    assert Plan(dp_size=2).runs_in == ("train", "deepspeed")
    assert Plan(dp_size=2, num_micro_batches=1).runs_in == ("megatron",)
    deepspeed = search(SPEC, jobs(4), HARDWARE, 4, SearchSpace(runs_in="deepspeed"))
    assert {(p.plan.pp_size, p.plan.cp_size) for p in deepspeed.plans} == {(1, 1)}
    assert {p.plan.recompute for p in deepspeed.plans} == {"none", "full"}


def test_what_is_fixed_stays_fixed() -> None:
    space = SearchSpace(
        tp_size=2, sequence_parallel=True, recompute="full", micro_batch_tokens=1024
    )
    plans = [p.plan for p in search(SPEC, jobs(4), HARDWARE, 4, space).plans]
    assert plans
    for plan in plans:
        assert (plan.tp_size, plan.sequence_parallel, plan.recompute) == (2, True, "full")
        assert plan.micro_batch_tokens == 1024


def test_states_of_many_jobs_fit_where_replicas_divide_them() -> None:
    many = [job(f"job{i}", rank=32, targets=HF_TARGETS, batch_size=64) for i in range(64)]
    hardware = shipped("a100-80g")
    link = Link(bytes_per_s=1e10, latency_s=1e-5)
    hardware = replace(hardware, inter_node=hardware.inter_node or link)
    space = SearchSpace(tp_size=1, pp_size=1, cp_size=1, recompute="full", micro_batch_tokens=4096)
    assert not search(LLAMA_8B, many, hardware, 64, space).plans
    (found, *_) = search(LLAMA_8B, many, hardware, 64, replace(space, shard_optimizer=True)).plans
    assert found.plan.shard_optimizer
    assert "sharded optimizer" in found.plan.label
    zero = replace(space, runs_in="deepspeed")
    assert [p.plan for p in search(LLAMA_8B, many, hardware, 64, zero).plans] == [found.plan]


def test_a_micro_batch_holds_what_is_evaluated_too() -> None:
    plans = search(SPEC, [job(longest_eval=3000)], HARDWARE, 1).plans
    assert min(p.plan.micro_batch_tokens for p in plans) == 3072


def test_several_nodes_need_a_link_and_a_result_says_so() -> None:
    result = search(SPEC, jobs(4), replace(HARDWARE, inter_node=None, gpus_per_node=2), 4)
    assert result.plans == ()
    assert "4 GPUs are more than the 2 of a node" in result.dropped[0].reason


def test_sequences_are_split_among_any_number_of_gpus() -> None:
    plans = search(SPEC, jobs(4), replace(HARDWARE, gpus_per_node=8), 7).plans
    split = [p.plan for p in plans if p.plan.cp_size == 7]
    assert split
    assert all(plan.micro_batch_tokens % 14 == 0 for plan in split)


def test_that_nothing_fits_is_known_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(LLAMA_8B, num_layers=80)
    tiny = replace(shipped("h100-infiniband"), memory_bytes=1e9)
    calls, use = itertools.count(), MemoryModel.use

    def counting(*args: Any) -> Any:
        next(calls)
        return use(*args)

    monkeypatch.setattr(MemoryModel, "use", counting)
    assert search(spec, jobs(8), tiny, 1024).plans == ()
    assert next(calls) < 45_000
    advice = advise(Question(spec, jobs(8), tiny, 1024))
    assert next(calls) < 110_000
    assert not advice.remedies
    assert "up to 4,096 GPUs" in advice.why_none
    assert "GiB of 0.9 GiB" in advice.why_none


@pytest.mark.parametrize(
    ("num_gpus", "space", "match"),
    [
        (0, {}, r"num_gpus must be in \[1, 4096\], got 0"),
        (5000, {}, "num_gpus must be in"),
        (1, {"micro_batch_tokens": 100}, "micro_batch_tokens must be at least 512, the longest s"),
        (1, {"micro_batch_tokens": 600, "largest_portion": 700}, "at least 700, the longest port"),
        (1, {"tp_size": 0}, "tp_size must be at least 1, got 0"),
        (2, {"tp_size": 3}, r"must allow some plan on 2 GPUs, got \{'tp_size': 3\}"),
        (1, {"vpp_size": 2}, r"must allow some plan on 1 GPUs, got \{'vpp_size': 2\}"),
    ],
)
def test_impossible_numbers_are_refused(num_gpus: int, space: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        search(SPEC, jobs(1), HARDWARE, num_gpus, SearchSpace(**space))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="jobs must hold at least one job"):
        search(SPEC, [], HARDWARE, 1)


_MIX = st.integers(1, 4).flatmap(
    lambda n: st.tuples(*[st.tuples(st.sampled_from((4, 16, 128)), st.integers(1, 6))] * n)
)


def _drawn(mix: tuple[tuple[int, int], ...]) -> list[JobLoad]:
    return [
        job(f"job{i}", rank=rank, batch_size=batch, lengths=LENGTHS)
        for i, (rank, batch) in enumerate(mix)
    ]


@settings(max_examples=10, deadline=None)
@given(mix=_MIX, num_gpus=st.sampled_from((1, 2, 4)), share=st.floats(0.5, 1.5))
def test_more_memory_never_removes_a_plan(
    mix: tuple[tuple[int, int], ...], num_gpus: int, share: float
) -> None:
    small = replace(HARDWARE, memory_bytes=1.3e9 * share)
    large = replace(HARDWARE, memory_bytes=1.3e9 * share * 1.5)
    before = {p.plan for p in search(LARGE, _drawn(mix), small, num_gpus).plans}
    after = {p.plan for p in search(LARGE, _drawn(mix), large, num_gpus).plans}
    assert before <= after


@settings(max_examples=15, deadline=None)
@given(
    mix=_MIX,
    num_gpus=st.sampled_from((2, 4, 16)),
    faster=st.floats(1.0, 50.0),
    latency=st.floats(0.0, 1.0),
)
def test_a_faster_link_never_slows_a_plan(
    mix: tuple[tuple[int, int], ...], num_gpus: int, faster: float, latency: float
) -> None:
    slow = _with_links(HARDWARE, 1e8, 1e-4)
    fast = _with_links(HARDWARE, 1e8 * faster, 1e-4 * latency)
    space = SearchSpace(recompute="none", micro_batch_tokens=1024)
    before, after = (
        {
            found.plan: found.cost
            for found in search(SPEC, _drawn(mix), machine, num_gpus, space).plans
            if found.plan.round_depth == 1  # only those of the first layouts are looked at deeper
        }
        for machine in (slow, fast)
    )
    assert before.keys() == after.keys()
    for plan, cost in before.items():
        assert after[plan].step_time_s <= cost.step_time_s * (1 + 1e-12)


def _with_links(hardware: HardwareProfile, rate: float, latency_s: float) -> HardwareProfile:
    near = Link(bytes_per_s=rate, latency_s=latency_s)
    far = Link(bytes_per_s=rate / 10, latency_s=latency_s)
    return replace(hardware, intra_node=near, inter_node=far)


def test_a_group_is_the_best_plan_found_and_the_same_when_asked_again() -> None:
    model = GroupModel(SPEC, HARDWARE)
    first = model.estimate(jobs(4), 2)
    for other in (model, GroupModel(SPEC, HARDWARE)):
        assert other.estimate(jobs(4), 2) == first
    assert first.fits
    assert first.plan is not None
    cost = step_cost(SPEC, jobs(4), first.plan, HARDWARE)
    assert sum(first.tokens_per_s) == pytest.approx(cost.tokens_per_s, rel=0.05)


def test_results_stand_in_the_order_of_the_jobs_whatever_their_names() -> None:
    small, large = job("a", batch_size=1), job("b", batch_size=8)
    model = GroupModel(SPEC, HARDWARE)
    one = model.estimate([small, large], 1)
    other = model.estimate([replace(large, name="x"), replace(small, name="y")], 1)
    assert one.tokens_per_s == other.tokens_per_s[::-1]
    assert one.tokens_per_s[1] > one.tokens_per_s[0]


def test_what_does_not_fit_says_so() -> None:
    estimate = GroupModel(SPEC, replace(HARDWARE, memory_bytes=1e5)).estimate(jobs(2), 1)
    assert not estimate.fits
    assert estimate.plan is None
    assert estimate.tokens_per_s == (0.0, 0.0)
    assert estimate.memory_bytes > 1e5


def test_bad_questions_are_refused() -> None:
    model = GroupModel(SPEC, replace(HARDWARE, inter_node=None))
    with pytest.raises(ValueError, match="at least one job"):
        model.estimate([], 1)
    with pytest.raises(ValueError, match="num_gpus must be at least 1, got 0"):
        model.estimate(jobs(1), 0)
    with pytest.raises(ValueError, match="num_gpus must be at most 8"):
        model.estimate(jobs(1), 16)


LOBRA_LIKE = LengthHistogram.from_counts([(200, 60), (500, 25), (1500, 10), (4000, 5), (16000, 1)])


def test_deeper_rounds_are_proposed_where_replicas_wait() -> None:
    mix = [job(f"job{i}", batch_size=64, lengths=LOBRA_LIKE) for i in range(12)]
    space = SearchSpace(runs_in="train", tp_size=1, pp_size=1, cp_size=1, micro_batch_tokens=16384)
    first = search(LLAMA_8B, mix, H200, 8, space).best
    assert first is not None
    assert first.plan.round_depth > 1
    assert first.plan.runs_in == ("train",)
    assert "rounds of" in first.plan.label
    shallow = CostModel(LLAMA_8B, mix, H200).step_cost(replace(first.plan, round_depth=1))
    assert first.cost.busy_share > 0.95 > shallow.busy_share
    assert first.cost.tokens_per_s > 1.05 * shallow.tokens_per_s
    assert first.cost.replica_wait_s < shallow.replica_wait_s
    wide = search(LLAMA_8B, mix, H200, 8, SearchSpace(runs_in="train", pp_size=1)).plans
    model = CostModel(LLAMA_8B, mix, H200)
    tried = [replace(own.plan, round_depth=2) for own in wide if own.plan.dp_size > 1]
    best = max(model.step_cost(plan).tokens_per_s for plan in tried)
    assert best <= 1.01 * wide[0].cost.tokens_per_s  # plans equal to three digits are as good
    deepspeed = search(LLAMA_8B, mix, H200, 8, replace(space, runs_in="deepspeed")).plans
    assert {ranked.plan.round_depth for ranked in deepspeed} == {1}
