"""Plans of bases with routed experts: which there are, what they cost, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.planner_case import (
    EXPERTS,
    H200,
    HARDWARE,
    SPEC,
    job,
    on_attention,
    published,
    shipped,
)
from tlora_megatron.config.job import EXPERT_TARGETS, HF_TARGETS, SHARED_EXPERT_TARGETS
from tlora_megatron.config.parallel_rules import check_expert_sizes
from tlora_megatron.config.schema import ParallelSpec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.planner.candidate import Plan, job_misfit, misfit, runners
from tlora_megatron.planner.deploy_sampled import saved_by_rows
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.search import GroupModel, search
from tlora_megatron.training.formats.hf_convert import check_layout

JOBS = on_attention(64, 8, 8)


def test_a_plan_shares_experts_where_the_run_says_so() -> None:
    sizes = itertools.product(
        (1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4, 8, 16), (None, 1), (False, True)
    )
    for tp, pp, dp, ep, expert_tp, sp in sizes:
        chosen: dict[str, Any] = {
            "tp_size": tp,
            "pp_size": pp,
            "sequence_parallel": sp,
            "ep_size": ep,
            "expert_tp_size": expert_tp,
        }
        if sp and tp == 1:
            continue  # a plan does not have it, a run has it without effect
        plan = Plan(dp_size=dp, micro_batch_tokens=1024, **chosen)
        spec = replace(EXPERTS, num_heads=8, num_kv_heads=4)
        try:
            check_expert_sizes(ParallelSpec(**chosen))
            check_layout(spec, ParallelLayout(**chosen).for_world(tp * pp * dp))
        except ValueError:
            assert misfit(spec, plan) is not None
        else:
            assert misfit(spec, plan) is None


def test_every_way_to_share_experts_is_looked_at() -> None:
    found = {
        (p.plan.tp_size, p.plan.sequence_parallel, p.plan.ep_size, p.plan.expert_tp)
        for p in search(EXPERTS, JOBS, HARDWARE, 4, SearchSpace(pp_size=1)).plans
    }
    apart = {(1, False, ep, 1) for ep in (1, 2, 4)}
    cut = {(2, sp, ep, 2) for sp in (False, True) for ep in (1, 2)}
    whole = {(2, True, ep, 1) for ep in (1, 2, 4)}
    assert found == apart | cut | whole


def test_plans_are_those_that_tlora_train_takes() -> None:
    result = search(EXPERTS, JOBS, replace(HARDWARE, nano_overlap=0.9), 4)
    assert {runners(EXPERTS, p.plan) for p in result.plans} == {("train",)}
    assert {p.plan.vpp_size for p in result.plans} == {1}
    assert {p.plan.num_nano_batches for p in result.plans} == {1}
    assert {p.plan.num_micro_batches for p in result.plans} == {None}
    assert all(p.plan.round_depth == 1 for p in result.plans if p.plan.ep_size > 1)


def test_a_dense_base_has_no_experts_to_share() -> None:
    plans = search(SPEC, [job()], HARDWARE, 4).plans
    assert {(p.plan.ep_size, p.plan.expert_tp_size) for p in plans} == {(1, None)}
    assert {p.cost.ep_comm_s for p in plans} == {0.0}
    assert misfit(SPEC, Plan(ep_size=2, dp_size=2)) == "a dense base has no experts to share"


def test_recompute_by_rows_is_told_of_where_micro_batches_may_differ() -> None:
    spec, jobs = published("qwen3-30b-a3b"), on_attention(512, 64)
    plan = Plan(dp_size=2, micro_batch_tokens=32768, recompute="full")
    saved = saved_by_rows(spec, jobs, plan, H200)
    assert saved is not None
    assert saved > 0
    assert saved_by_rows(spec, jobs, replace(plan, ep_size=2), H200) is None


def test_targets_on_experts_have_their_own_names() -> None:
    jobs = [*JOBS, job("b", targets=("q_proj", "up_proj"))]
    with pytest.raises(ValueError, match=r"targets of job 'b' must be among q_proj, .*, got up"):
        search(EXPERTS, jobs, HARDWARE, 1)


def test_sharded_states_of_adapters_on_experts_need_whole_layers() -> None:
    jobs = [replace(on_attention()[0], targets=EXPERT_TARGETS)]
    reason = "sharded optimizer states of adapters on routed experts need EP 1"
    plan = Plan(dp_size=2, ep_size=2, shard_optimizer=True)
    assert job_misfit(jobs, plan) == reason
    assert job_misfit(jobs, replace(plan, ep_size=1)) is None
    assert job_misfit(on_attention(), plan) is None


def test_a_shared_expert_is_cut_by_all_tensor_parallel_ranks() -> None:
    spec = replace(EXPERTS, shared_ffn_size=301)
    plans = search(spec, JOBS, HARDWARE, 2).plans
    assert {p.plan.tp_size for p in plans} == {1}
    assert misfit(spec, Plan(tp_size=2)) == "shared_ffn_size 301 is no multiple of TP 2"
    even = replace(spec, shared_ffn_size=300)
    assert {p.plan.tp_size for p in search(even, JOBS, HARDWARE, 2).plans} == {1, 2}


def test_targets_on_a_shared_expert_need_one() -> None:
    jobs = [*JOBS, job("b", targets=("q_proj", *SHARED_EXPERT_TARGETS))]
    assert search(replace(EXPERTS, shared_ffn_size=300), jobs, HARDWARE, 1).plans
    with pytest.raises(ValueError, match=r"targets of job 'b' must be among .*, got shared_expert"):
        search(EXPERTS, jobs, HARDWARE, 1)


def test_a_group_is_as_fast_as_the_best_plan_without_context_parallelism() -> None:
    model, space = GroupModel(EXPERTS, HARDWARE), SearchSpace(cp_size=1, runs_in="train")
    for mix in (JOBS, [replace(own, targets=EXPERT_TARGETS, expert_rank=2) for own in JOBS]):
        found = model.estimate(mix, 4)
        assert found.plan is not None
        best = search(EXPERTS, mix, HARDWARE, 4, space).plans[0].cost.tokens_per_s
        assert sum(found.tokens_per_s) == pytest.approx(best, rel=0.1)


def test_groups_share_experts_where_a_base_is_too_large() -> None:
    model = GroupModel(published("qwen3-235b-a22b"), H200)
    assert not model.estimate(on_attention(512, 8), 2).fits
    found = model.estimate(on_attention(512, 8), 8)
    assert found.plan is not None
    assert found.plan.ep_size * found.plan.expert_tp * found.plan.pp_size >= 4
    assert model.holds(on_attention(512, 8), found.plan)


def test_a_group_takes_targets_by_their_dense_names() -> None:
    model, own = GroupModel(EXPERTS, HARDWARE), on_attention(64, 8)
    named = [replace(job, targets=(*job.targets, *EXPERT_TARGETS)) for job in own]
    dense = [replace(job, targets=HF_TARGETS) for job in own]
    assert model.estimate(dense, 2) == model.estimate(named, 2)


def test_a_group_tells_adapters_on_experts_apart() -> None:
    """Own factors of 128 experts have states of 60 GB at rank 64, and of 1 GB at rank 1."""
    hardware = shipped("h100")
    model = GroupModel(published("qwen3-30b-a3b"), hardware)
    large = replace(on_attention(512, 8)[0], targets=EXPERT_TARGETS, expert_rank=64)
    fits = [model.estimate([replace(large, expert_rank=n)], 1).fits for n in (1, 64)]
    assert fits == [True, False]
    own, shared = (model.estimate([load], 2) for load in (large, replace(large, shares_outer=True)))
    assert own.tokens_per_s != shared.tokens_per_s
