"""Times of routed experts: by hand, against the floor of a layer, and what moves them which way."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.planner_case import (
    EXPERTS,
    HARDWARE,
    SPEC,
    memory_use,
    on_attention,
    step_cost,
)
from tlora_megatron.config.job import EXPERT_TARGETS, SHARED_EXPERT_TARGETS
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.experts import RoutedCost, RoutedWork, fullest_share
from tlora_megatron.planner.cost.layer_cost import LayerCost, LayerModel
from tlora_megatron.planner.cost.rates import ExpertTimes, Rates
from tlora_megatron.planner.hardware import HardwareProfile, HostCost
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad

ROWS = 1024
HOST = HostCost(layer_s=1e-3, round_s=0.0, job_step_s=0.0)


def routed(plan: Plan, hardware: HardwareProfile = HARDWARE, rows: float = ROWS) -> RoutedCost:
    return RoutedWork(EXPERTS, Rates(hardware, ExpertTimes())).cost(plan, rows)


def load_of(rows: float, sequences: float = 8.0) -> RoundLoad:
    """A micro-batch of one job, which steps every round."""
    return RoundLoad(1, rows, job_tokens=(rows,), job_sequences=(sequences,), steps=(1.0,))


def test_products_and_passes_on_one_gpu() -> None:
    found = routed(Plan())
    router = 2 * ROWS * 8 * 100 / 1e9
    # Two experts a row; the last tile of each of eight is half full.
    rows = 2 * ROWS + 8 * 64
    products = 2 * rows * 3 * 200 * 100 / 1e9
    assert found.gemm_s == pytest.approx((router + products, 2 * (router + products)))
    scores = ROWS * 8 * (2 + 12 + 4), ROWS * 8 * (12 + 2)
    # Rows are spread, read again and summed; SwiGLU with weights lies between.
    moved = (2 + 1 + 1 / 2) * 100
    forward = 2 * ROWS * (moved + 3 * 200) * 2
    backward = 2 * ROWS * (moved + 5 * 200) * 2
    expected = (scores[0] + forward) / 1e9, (scores[1] + backward) / 1e9
    assert found.stream_s == pytest.approx(expected)
    assert found.exchange_s == (0.0, 0.0)


def test_expert_parallel_ranks_exchange_rows_and_wait_for_the_fullest() -> None:
    machine = replace(HARDWARE, host=HOST)
    found = routed(Plan(dp_size=4, ep_size=4), machine)
    alone = routed(Plan(dp_size=4), machine)
    # The mean rank computes as many rows as before, for fewer experts.
    assert found.gemm_s[0] < alone.gemm_s[0]
    router = 2 * ROWS * 8 * 100 / 1e9
    scores = ROWS * 8 * (2 + 12 + 4) / 1e9
    hidden, late = 2 * ROWS * 100 * 2, fullest_share(4, 2) - 1
    sent = 8 * 8 + 2 * ROWS * 2 + 2 * hidden
    work = found.gemm_s[0] - router + found.stream_s[0] - scores
    expected = (1 + late) * 3 / 4 * sent / 1e9 + late * work + 0.07e-3
    assert found.exchange_s[0] == pytest.approx(expected)


def test_an_exchange_over_nodes_takes_the_network() -> None:
    nodes = HARDWARE.of_nodes(4)
    near, far = (routed(Plan(dp_size=8, ep_size=ep), nodes) for ep in (4, 8))
    hidden = 2 * ROWS * 100 * 2
    # Four of eight ranks are in the other node, behind 1e8 bytes a second.
    carried = fullest_share(8, 1) * (2 * hidden + 2 * ROWS * 4) / 2 / 1e8
    waited = (fullest_share(8, 1) - 1) * _routed_only(Plan(dp_size=8, ep_size=8))
    assert far.exchange_s[1] == pytest.approx(carried + waited)
    assert far.exchange_s[1] > near.exchange_s[1]


def _routed_only(plan: Plan) -> float:
    """Seconds of backward for the rows that came to experts: all but the router's part."""
    found = routed(plan)
    scores = ROWS * 8 * (12 + 2) / 1e9
    return found.gemm_s[1] - 2 * 2 * ROWS * 8 * 100 / 1e9 + found.stream_s[1] - scores


def test_whole_experts_take_a_rank_s_own_rows_and_cut_ones_all() -> None:
    sp = Plan(tp_size=2, sequence_parallel=True)
    whole, cut = routed(replace(sp, expert_tp_size=1)), routed(sp)
    half = routed(Plan(), rows=ROWS / 2)
    assert whole == half
    assert cut.stream_s[0] > whole.stream_s[0]  # rows are spread and summed on both ranks
    carried = _layer(sp).tp_comm_s - _layer(replace(sp, expert_tp_size=1)).tp_comm_s
    # Hidden states are gathered and scattered around cut experts, forward and backward.
    assert carried == pytest.approx(4 * 8192 * 100 * 2 / 2 / 1e9)


def _layer(plan: Plan, spec: ModelSpec = EXPERTS) -> LayerCost:
    load = load_of(8192.0, sequences=16.0)
    return LayerModel(spec, on_attention(), Rates(HARDWARE)).cost(plan, load)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_shared_expert_is_an_mlp_for_all_rows_and_a_gate(tp_size: int) -> None:
    plan = Plan(tp_size=tp_size, sequence_parallel=tp_size > 1)
    beside = replace(EXPERTS, shared_ffn_size=300)
    alone, both = _layer(plan), _layer(plan, beside)
    products = 2 * 8192 * 3 * 300 * 100 / tp_size / 1e9
    assert both.gemm_s - alone.gemm_s == pytest.approx(3 * products)
    # The gate, its gradient in fp32, and the sums; SwiGLU three times forward and five backward.
    gate = (6 * 2 + 2 * (2 + 4) + 4 * 4 + 9 * 2) * 100
    passes = 8192 / tp_size * (gate + 8 * 300 * 2) / 1e9
    assert both.elementwise_s - alone.elementwise_s == pytest.approx(passes)
    gathered = 4 * 8192 * 100 * 2 / 2 / 1e9 * (tp_size - 1)
    assert both.tp_comm_s - alone.tp_comm_s == pytest.approx(gathered)
    again = _layer(replace(plan, recompute="selective"), beside)
    before = _layer(replace(plan, recompute="selective"))
    forward = products + 8192 / tp_size * (6 * 2 * 100 + 3 * 300 * 2) / 1e9 + gathered / 2
    assert again.recompute_s - before.recompute_s == pytest.approx(forward)


def test_adapters_on_a_shared_expert_take_time_and_memory() -> None:
    beside = replace(EXPERTS, shared_ffn_size=300)
    with_them = replace(on_attention()[0], targets=SHARED_EXPERT_TARGETS)
    machine = replace(HARDWARE, lora=replace(HARDWARE.lora, forward_rank_s=1e-12))
    load = load_of(ROWS)
    cost = LayerModel(beside, [with_them], Rates(machine)).cost(Plan(), load)
    assert cost.lora_s == pytest.approx(1e-12 * ROWS * 16 * (2 * 300 + 100))
    plan = Plan(micro_batch_tokens=512)
    use = memory_use(beside, [with_them], plan, HARDWARE)
    assert use.adapter_gradients == 4 * 4 * 16 * 3 * (100 + 300)
    weights = memory_use(EXPERTS, on_attention(), plan, HARDWARE).base_weights
    assert use.base_weights - weights == 2 * 4 * (3 * 300 * 100 + 100)


def test_recompute_runs_experts_and_their_exchange_again() -> None:
    plan = Plan(dp_size=4, ep_size=4)
    times = {name: _layer(replace(plan, recompute=name)) for name in ("none", "selective", "full")}
    work = RoutedWork(EXPERTS, Rates(HARDWARE)).cost(plan, 8192)
    again = times["selective"].recompute_s
    assert again > work.gemm_s[0] + work.stream_s[0] + work.exchange_s[0]
    assert times["full"].recompute_s > again > times["none"].recompute_s == 0.0
    assert len({time.ep_comm_s for time in times.values()}) == 1


def test_a_round_has_the_layers_exchanges() -> None:
    plan, jobs = Plan(dp_size=2, ep_size=2, micro_batch_tokens=8192), on_attention(512, 16, 16)
    found = step_cost(EXPERTS, jobs, plan, HARDWARE)
    assert found.ep_comm_s > 0
    alone = step_cost(EXPERTS, jobs, replace(plan, ep_size=1), HARDWARE)
    assert found.step_time_s > alone.step_time_s


def test_without_bf16_experts_are_products_of_their_own() -> None:
    rates = Rates(replace(HARDWARE, dtype="float32"))
    expected = 8 * rates.gemm_s(256 / 8, 400, 100)
    assert rates.grouped_gemm_s(256, 8, 400, 100) == expected


def test_a_step_of_a_job_on_experts_sums_and_updates_all_of_its_elements() -> None:
    machine = replace(HARDWARE, copy_bytes_per_s=1e9)
    rates = Rates(machine, ExpertTimes(job_step_s=2.0))
    plan = Plan(dp_size=4, micro_batch_tokens=8192)
    elements = EXPERTS.num_layers * 8 * 4 * 3 * (100 + 200)
    job = replace(on_attention()[0], targets=EXPERT_TARGETS, expert_rank=4)

    def steps(job: JobLoad, plan: Plan) -> float:
        return CostModel(EXPERTS, [job], machine, rates=rates).all_steps_s(plan)

    held = steps(job, plan)
    summed = rates.collective_s("all_reduce", 4, elements * 4)
    assert held == pytest.approx(summed + 52 * elements / 1e9 + 2.0)
    # Of shared experts every rank has a part, whose replicas are fewer.
    alone = steps(job, replace(plan, ep_size=4))
    assert alone == pytest.approx(52 * elements / 4 / 1e9 + 2.0)
    attention = EXPERTS.num_layers * 16 * (4 * 100 + 100 + 20 + 20 + 100)
    assert steps(on_attention()[0], replace(plan, dp_size=1)) == pytest.approx(52 * attention / 1e9)


def test_a_round_is_waited_for_where_a_job_steps() -> None:
    host = HostCost(layer_s=0.0, round_s=0.5, job_step_s=0.0)
    plan = Plan(micro_batch_tokens=128)

    def round_s(*steps: float, spec: ModelSpec = EXPERTS, **changes: Any) -> float:
        jobs = [replace(on_attention(64)[0], name=f"job{n}") for n in range(len(steps))]
        even = tuple(128 / len(steps) for _ in steps)
        load = RoundLoad(1, 128, job_tokens=even, job_sequences=even, steps=steps)
        model = CostModel(spec, jobs, replace(HARDWARE, host=host))
        return model.step_cost(replace(plan, **changes), load).round_s

    assert round_s(1 / 8) == pytest.approx(0.5 / 8)
    assert round_s(1 / 8, 1 / 8) == pytest.approx(0.5 / 8)  # begun together, they step together
    assert round_s(1 / 2, 1 / 4) == pytest.approx(0.5 * (1 - 1 / 2 * 3 / 4))
    assert round_s(1 / 2, 1.0) == 0.5
    assert round_s(1 / 8, spec=SPEC) == 0.5


@pytest.mark.parametrize("ranks", [2, 4, 8, 128])
def test_one_expert_a_rank_is_the_largest_of_exponential_variables(ranks: int) -> None:
    largest = sum(1 / n for n in range(1, ranks + 1))
    assert fullest_share(ranks, 1) == pytest.approx(largest, rel=0.015)


@pytest.mark.parametrize(("ranks", "experts"), [(2, 4), (8, 16), (64, 2)])
def test_several_experts_a_rank_are_the_largest_of_their_sums(ranks: int, experts: int) -> None:
    draw = random.Random(0)
    drawn = [
        max(draw.gammavariate(experts, 1) for _ in range(ranks)) / experts for _ in range(4000)
    ]
    assert fullest_share(ranks, experts) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)


def test_more_ranks_are_less_even_and_more_experts_more() -> None:
    by_ranks = [fullest_share(ranks, 128 // ranks) for ranks in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert by_ranks == sorted(by_ranks)
    by_layers = [fullest_share(8, 16 * layers) for layers in (1, 2, 12, 48)]
    assert by_layers == sorted(by_layers, reverse=True)
    assert 1 < by_layers[-1] < 1.1
