"""The cost model: every term by hand on a machine with round numbers; look-ups between points."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from tests.helpers.planner_case import FREE_LORA, HARDWARE, SPEC, job, step_cost
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.cost_model import OPTIMIZER_BYTES, CostModel
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.cost.step_terms import TERMS, StepCost
from tlora_megatron.planner.hardware import (
    AttentionPoint,
    CollectivePoint,
    GemmPoint,
    HardwareProfile,
    HostCost,
    Link,
)
from tlora_megatron.planner.layouts import Span
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

LAYERS, ROWS = 4, 128
GEMM_S = 2 * ROWS * 84_000 / 1e9
"""Forward of a layer; backward takes twice as long."""
ATTENTION_S = 4 * (128 * 129 / 2) * 10 * 10 / 1e9
STREAM = 128 * 100
FORWARD_BYTES = 2 * (9 * STREAM + 2 * 128 * 140 + 3 * 128 * 200)
BACKWARD_BYTES = 2 * (8 * STREAM + 2 * 128 * 140 + 5 * 128 * 200)


def cost(
    plan: Plan | None = None, hardware: HardwareProfile = HARDWARE, *jobs: JobLoad
) -> StepCost:
    return step_cost(SPEC, jobs or [job()], plan or Plan(micro_batch_tokens=128), hardware)


def test_terms_are_all_seconds_of_the_result_and_add_up() -> None:
    assert {f.name for f in fields(StepCost)} == {*TERMS, "load", "busy_share"}
    found = cost()
    assert found.step_time_s == pytest.approx(sum(getattr(found, name) for name in TERMS))
    assert found.tokens_per_s == pytest.approx(128 / found.step_time_s)
    assert found.job_step_time_s == (found.step_time_s,)
    assert found.binding == "gemm_s"


def test_compute_on_one_gpu() -> None:
    found = cost()
    assert found.gemm_s == pytest.approx(LAYERS * 3 * GEMM_S)
    assert found.attention_s == pytest.approx(LAYERS * 3.5 * ATTENTION_S)
    assert found.elementwise_s == pytest.approx(LAYERS * (FORWARD_BYTES + BACKWARD_BYTES) / 1e9)
    head = 2 * 128 * 1000 * 100 * 3 / 1e9 + 3 * 128 * 1000 * 2 / 1e9
    assert found.head_s == pytest.approx(head + 2 * 2 * STREAM / 1e9)
    zero = [n for n in TERMS if n not in ("gemm_s", "attention_s", "elementwise_s", "head_s")]
    assert [getattr(found, name) for name in zero] == pytest.approx([0] * len(zero))


def test_fp8_linears_run_at_their_own_rate_and_the_rest_at_the_old_one() -> None:
    whole = 2 * ROWS * 100 * 140 / 1e9
    some = step_cost(
        replace(SPEC, fp8_linears=(("linear_qkv", LAYERS // 2),)),
        [job()],
        Plan(micro_batch_tokens=128),
        replace(HARDWARE, fp8_speedup=2.0),
    )
    assert some.gemm_s == pytest.approx(3 * (LAYERS * GEMM_S - LAYERS / 2 * whole / 2))
    assert some.head_s == cost().head_s
    measured = tuple(
        replace(point, forward_flops_per_s=4e9, backward_flops_per_s=1e9)
        for point in HARDWARE.gemms
    )
    rates = Rates(replace(HARDWARE, fp8_gemms=measured))
    assert rates.gemm_s(ROWS, 140, 100, fp8=True) == pytest.approx(whole / 4)
    assert rates.gemm_s(ROWS, 140, 100, fp8=True, backward=True) == pytest.approx(whole)
    slow = Rates(replace(HARDWARE, copy_bytes_per_s=1.0))
    assert slow.gemm_s(ROWS, 140, 100, fp8=True) == ROWS * (100 + 140 * 2) + 140 * 100
    back_s = ROWS * (140 + 100 * 2) + 140 * 100
    assert slow.gemm_s(ROWS, 140, 100, fp8=True, backward=True) == back_s


def test_an_fp8_base_is_refused_where_the_gpu_has_no_fp8_products() -> None:
    with pytest.raises(ValueError, match="must know FP8 products for an FP8 base, got round"):
        step_cost(
            replace(SPEC, fp8_linears=(("linear_qkv", 1),)),
            [job()],
            Plan(micro_batch_tokens=128),
            replace(HARDWARE, fp8_speedup=None),
        )


def test_only_rows_with_a_target_reach_the_head() -> None:
    spec = replace(SPEC, vocab_size=100_000)
    plan = Plan(micro_batch_tokens=4096)
    whole = [job(batch_size=32)]
    half = [job(batch_size=32, target_share=0.5)]
    full_s, half_s = (step_cost(spec, jobs, plan, HARDWARE).head_s for jobs in (whole, half))
    assert half_s == pytest.approx(full_s / 2, rel=0.01)


def test_attention_is_quadratic_in_each_jobs_own_lengths() -> None:
    plan = Plan(micro_batch_tokens=512)
    short = cost(plan, HARDWARE, job(batch_size=4)).attention_s
    long = cost(plan, HARDWARE, job(lengths=LengthHistogram.single(512))).attention_s
    assert long / short == pytest.approx(513 / 129)


@pytest.mark.parametrize(
    ("coefficient", "count", "rank"),
    [
        ("forward_fixed_s", 1, 16),
        ("forward_input_s", ROWS * 100, 16),
        ("forward_rank_s", ROWS * 100 * 16, 16),
        ("forward_rank_s", ROWS * 100 * 16, 4),  # ranks count in 16s
        ("forward_factor_s", 16 * (100 + 100), 16),
        ("backward_fixed_s", 1, 16),
        ("backward_stream_s", ROWS * (2 * 140 + 100), 16),
        ("backward_rank_s", ROWS * 100 * 16, 16),
        ("backward_factor_s", 16 * (100 + 100), 16),
        ("backward_factor_s", 4 * (100 + 100), 4),  # gradients as they are
    ],
)
def test_adapters_cost_what_their_counts_say(coefficient: str, count: int, rank: int) -> None:
    hardware = replace(HARDWARE, lora=replace(FREE_LORA, **{coefficient: 1e-9}))
    found = cost(None, hardware, job(rank=rank)).lora_s
    assert found == pytest.approx(LAYERS * count * 1e-9)


def test_dropout_costs_rows_of_jobs_that_have_it() -> None:
    lora = replace(FREE_LORA, forward_dropout_s=1e-9, backward_dropout_s=2e-9)
    hardware = replace(HARDWARE, lora=lora)
    plan = Plan(micro_batch_tokens=256)
    found = cost(plan, hardware, job("a", dropout=0.1), job("b")).lora_s
    assert found == pytest.approx(LAYERS * 0.5 * 256 * 100 * 3e-9)


def test_tensor_parallelism_halves_compute_and_reduces_four_times_a_layer() -> None:
    one, two = cost(), cost(Plan(tp_size=2, micro_batch_tokens=128))
    assert two.gemm_s == pytest.approx(one.gemm_s / 2)
    assert two.attention_s == pytest.approx(one.attention_s / 2)
    reduce_s = 2 * STREAM / 1e9  # 2 (n - 1) / n of the tensor
    assert two.tp_comm_s == pytest.approx(LAYERS * 4 * reduce_s)
    # The replicated A, 16 x 100 in fp32 a layer, is summed once a step.
    assert two.gradient_sync_s == pytest.approx(LAYERS * 16 * 100 * 4 / 1e9)


def test_collectives_between_kernels_are_stretched() -> None:
    plan = Plan(tp_size=2, micro_batch_tokens=128, recompute="full")
    plain, stretched = cost(plan), cost(plan, replace(HARDWARE, stretch=1.5))
    assert stretched.tp_comm_s == pytest.approx(1.5 * plain.tp_comm_s)
    again = LAYERS * 2 * 2 * STREAM / 1e9
    assert stretched.recompute_s == pytest.approx(plain.recompute_s + 0.5 * again)


def test_sequence_parallelism_gathers_and_scatters_and_sums_ds() -> None:
    plan = Plan(tp_size=2, sequence_parallel=True, micro_batch_tokens=128)
    moved = 2 * STREAM / 1e9  # a gather and a scatter of half the tensor each
    ds = 128 * 16 * 2 / 1e9
    assert cost(plan).tp_comm_s == pytest.approx(LAYERS * (4 * moved + ds))
    less = 7 * STREAM + 2 * STREAM + 8 * STREAM
    elements = 4 * 128 * 140 + 8 * 128 * 200
    assert cost(plan).elementwise_s == pytest.approx(LAYERS * (less + elements) / 1e9)


@pytest.mark.parametrize(
    ("blocks", "in_blocks"), [(1, False), (1, True), (2, False)], ids=["", "groups", "whole x"]
)
def test_fp8_codes_are_gathered_unless_adapters_need_x(blocks: int, in_blocks: bool) -> None:
    plan = Plan(tp_size=2, sequence_parallel=True, micro_batch_tokens=128)
    linears = (("linear_qkv", LAYERS // 2),)
    spec, hardware = replace(SPEC, fp8_in_blocks=in_blocks), replace(HARDWARE, fp8_speedup=2.0)
    jobs = [job(num_blocks=blocks)]
    wide, codes = (
        step_cost(each, jobs, plan, hardware) for each in (spec, replace(spec, fp8_linears=linears))
    )
    ds = 128 * 16 * 2  # s is summed as dS is
    saved = 0 if blocks > 1 else STREAM - STREAM / 2 - 128 * 4 / 2 - ds
    assert wide.tp_comm_s - codes.tp_comm_s == pytest.approx(LAYERS / 2 * saved / 1e9)


def test_reductions_of_dx_hide_behind_factor_gradients() -> None:
    lora = replace(FREE_LORA, backward_fixed_s=1.0)
    plan = Plan(tp_size=2, micro_batch_tokens=128)
    hidden = cost(plan, replace(HARDWARE, lora=lora, overlap=0.5)).tp_comm_s
    assert hidden == pytest.approx(cost(plan).tp_comm_s * 0.75)


def test_recompute_runs_forward_parts_again() -> None:
    selective = cost(Plan(micro_batch_tokens=128, recompute="selective")).recompute_s
    mlp_bytes = 2 * (7 * STREAM + 3 * 128 * 200)
    assert selective == pytest.approx(LAYERS * (2 * ROWS * 60_000 + mlp_bytes) / 1e9)
    full = cost(Plan(micro_batch_tokens=128, recompute="full")).recompute_s
    assert full == pytest.approx(LAYERS * (GEMM_S + ATTENTION_S + FORWARD_BYTES / 1e9))


def test_context_parallelism_gathers_keys_and_values() -> None:
    plan = Plan(cp_size=2, micro_batch_tokens=256)
    found = cost(plan, HARDWARE, job(batch_size=2))
    keys_and_values = 256 * 2 * 20 * 2
    assert found.cp_comm_s == pytest.approx(LAYERS * 2 * keys_and_values / 2 / 1e9)
    assert found.gemm_s == pytest.approx(cost().gemm_s)


def test_a_pipeline_pays_hops_bubble_and_imbalance() -> None:
    jobs = [job(batch_size=8)]
    one = step_cost(SPEC, jobs, Plan(micro_batch_tokens=128), HARDWARE)
    found = step_cost(SPEC, jobs, Plan(pp_size=2, micro_batch_tokens=128), HARDWARE)
    assert found.load.micro_batches == 8
    hop = 2 * 2 * STREAM / 1e9
    assert found.pp_comm_s == pytest.approx(8 * hop)
    layer = 3 * GEMM_S + 3.5 * ATTENTION_S + (FORWARD_BYTES + BACKWARD_BYTES) / 1e9
    embedding = 2 * 2 * STREAM / 1e9
    first, last = 2 * layer + hop + embedding, 2 * layer + hop + (one.head_s - embedding)
    assert found.imbalance_s == pytest.approx(8 * (last - (first + last) / 2))
    assert found.bubble_s == pytest.approx(first)
    assert found.step_time_s == pytest.approx(8 * last + first)


def test_other_jobs_micro_batches_make_the_bubble_a_smaller_share() -> None:
    plan = Plan(pp_size=4, micro_batch_tokens=128)
    one = cost(plan, HARDWARE, job("a", batch_size=4))
    many = cost(plan, HARDWARE, *(job(n, batch_size=4) for n in "abcd"))
    assert one.bubble_s == pytest.approx(many.bubble_s)
    assert many.bubble_s / many.step_time_s < 0.5 * one.bubble_s / one.step_time_s


def test_replicas_sum_gradients_over_the_link_between_them() -> None:
    jobs = [job(batch_size=2)]
    gradient = LAYERS * 16 * 200 * 4
    near = step_cost(SPEC, jobs, Plan(dp_size=2, micro_batch_tokens=128), HARDWARE)
    assert near.gradient_sync_s == pytest.approx(gradient / 1e9)
    far = step_cost(SPEC, [job(batch_size=16)], Plan(dp_size=16, micro_batch_tokens=128), HARDWARE)
    assert far.gradient_sync_s == pytest.approx(2 * 15 / 16 * gradient / 1e8)


def test_sharded_states_gather_compute_copies_and_update_less_on_each_replica() -> None:
    hardware = replace(HARDWARE, copy_bytes_per_s=1e9)
    plan, elements = Plan(dp_size=2, micro_batch_tokens=128), LAYERS * 16 * 200
    model = CostModel(SPEC, [job(batch_size=2)], hardware)
    whole, sharded = (
        model.step_cost(replace(plan, shard_optimizer=shards)) for shards in (False, True)
    )
    gathered_s = 0.5 * elements * 2 / 1e9
    assert sharded.gradient_sync_s - whole.gradient_sync_s == pytest.approx(gathered_s)
    assert whole.optimizer_s == pytest.approx(elements * OPTIMIZER_BYTES / 1e9)
    assert sharded.optimizer_s == pytest.approx(elements * (OPTIMIZER_BYTES - 19 + 8) / 1e9)


def test_a_job_that_steps_every_third_round_pays_a_third() -> None:
    hardware = replace(
        HARDWARE, copy_bytes_per_s=1e9, host=HostCost(layer_s=0, round_s=0.5, job_step_s=3)
    )
    slow = RoundLoad(
        micro_batches=1, rows=128, job_tokens=(128,), job_sequences=(1,), steps=(1 / 3,)
    )
    found = CostModel(SPEC, [job()], hardware).step_cost(Plan(micro_batch_tokens=128), slow)
    elements = LAYERS * 16 * 200
    assert found.optimizer_s == pytest.approx((elements * OPTIMIZER_BYTES / 1e9 + 3) / 3)
    assert found.round_s == 0.5


def test_a_gpu_that_is_faster_than_the_host_waits() -> None:
    hardware = replace(HARDWARE, host=HostCost(layer_s=1.0, round_s=0, job_step_s=0))
    assert cost(hardware=hardware).step_time_s == pytest.approx(LAYERS * 1.0)
    full = Plan(micro_batch_tokens=128, recompute="full")
    assert cost(full, hardware).step_time_s == pytest.approx(LAYERS * 1.4)


def test_a_gpu_waits_in_small_rounds_even_where_it_does_not_in_the_mean_one() -> None:
    # The device takes as long as the host for a mean round. In one a quarter as large it waits for
    # three quarters of that, one of 1.75 takes as much longer: 0.25 -> 1, 1.75 -> 1.75.
    plan = Plan(micro_batch_tokens=128)
    device_s = cost().step_time_s
    host = HostCost(layer_s=device_s / LAYERS, round_s=0, job_step_s=0)
    model = CostModel(SPEC, [job()], replace(HARDWARE, host=host))
    load = model.round_load(plan)
    assert load.sizes == ((1.0, 1.0),)
    assert model.step_cost(plan, load).host_s == pytest.approx(0, abs=1e-12)
    uneven = replace(load, sizes=((0.5, 0.25), (0.5, 1.75)))
    assert model.step_cost(plan, uneven).host_s == pytest.approx(0.375 * device_s)


def _gemm(rows: int, columns: int, inner: int, rate: float) -> GemmPoint:
    rates = {"forward_flops_per_s": rate, "backward_flops_per_s": rate / 2}
    return GemmPoint(rows=rows, columns=columns, inner=inner, **rates)


def test_gemms_are_interpolated_in_rows_and_taken_from_near_shapes() -> None:
    points = (_gemm(100, 10, 10, 1e9), _gemm(400, 10, 10, 3e9), _gemm(100, 1000, 1000, 9e9))
    rates = Rates(replace(HARDWARE, gemms=points))
    flops = 2 * 10 * 10
    assert rates.gemm_s(100, 10, 10) == pytest.approx(100 * flops / 1e9)
    assert rates.gemm_s(200, 10, 10) == pytest.approx(200 * flops / 2e9)  # halfway in log rows
    assert rates.gemm_s(800, 10, 10) == pytest.approx(800 * flops / 3e9)
    assert rates.gemm_s(100, 10, 10, backward=True) == pytest.approx(100 * flops / 5e8)
    near = 2 * 100 * 12 * 10 / rates.gemm_s(100, 12, 10)
    assert 1e9 < near < 1.1e9


def test_a_gemm_is_never_faster_than_its_operands_are_moved() -> None:
    rates = Rates(replace(HARDWARE, copy_bytes_per_s=1e3))
    assert rates.gemm_s(1, 100, 100) == pytest.approx(2 * (200 + 10_000) / 1e3)


def test_attention_is_interpolated_in_the_log_of_the_length() -> None:
    points = tuple(
        AttentionPoint(length=n, forward_flops_per_s=r, backward_flops_per_s=r)
        for n, r in ((100, 1e9), (400, 3e9))
    )
    forward, backward = Rates(replace(HARDWARE, attention=points)).attention_s(200, 1, 10)
    assert forward == pytest.approx(4 * 10 * (200 * 201 / 2) / 2e9)
    assert backward == pytest.approx(2.5 * forward)


@pytest.mark.parametrize(
    ("op", "ranks", "seconds"),
    [
        ("all_reduce", 2, 1.0 + 2 * 0.1),
        ("all_reduce", 4, 1.5 + 4 * 0.1),
        ("all_gather", 4, 0.75 + 2 * 0.1),
        ("reduce_scatter", 2, 0.5 + 0.1),
        ("p2p", 2, 1.0 + 0.1),
        ("all_reduce", 1, 0.0),
    ],
)
def test_a_collective_that_was_not_measured_is_a_ring(op: str, ranks: int, seconds: float) -> None:
    hardware = replace(HARDWARE, intra_node=Link(bytes_per_s=1e6, latency_s=0.1))
    assert Rates(hardware).collective_s(op, ranks, 1e6) == pytest.approx(seconds)  # type: ignore[arg-type]


def test_a_measured_collective_is_interpolated_and_extended() -> None:
    points = tuple(
        CollectivePoint(op="all_reduce", ranks=2, bytes=b, seconds=s)
        for b, s in ((100, 1.0), (200, 2.0))
    )
    rates = Rates(replace(HARDWARE, collectives=points))
    times = [rates.collective_s("all_reduce", 2, b) for b in (10, 150, 400)]
    assert times == pytest.approx([1.0, 1.5, 4.0])
    assert rates.collective_s("all_reduce", 2, 1e6, over=Span(2, 2, 1)) == pytest.approx(1e6 / 1e8)


def test_a_plan_over_nodes_needs_a_link_between_them() -> None:
    alone = replace(HARDWARE, inter_node=None)
    with pytest.raises(ValueError, match="inter_node must be given for 16 GPUs of several nodes"):
        step_cost(SPEC, [job(batch_size=16)], Plan(dp_size=16, micro_batch_tokens=128), alone)


def test_times_are_finite_and_not_negative_in_odd_corners() -> None:
    tiny = job(lengths=LengthHistogram.single(1))
    found = cost(Plan(tp_size=2, pp_size=2, cp_size=2, dp_size=8), HARDWARE, tiny)
    assert all(0 <= getattr(found, name) < math.inf for name in TERMS)


def test_a_micro_batch_must_hold_the_longest_sequence() -> None:
    with pytest.raises(ValueError, match="at least 128, the longest sequence of job 'a', got 64"):
        cost(Plan(micro_batch_tokens=64))
