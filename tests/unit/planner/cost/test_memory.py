"""The memory model: every term by hand on a small model, and measured peaks of Llama-3.1-8B."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.planner_case import HARDWARE, LLAMA_8B, SPEC, job, memory_use
from tlora_megatron.layers import arenas, sites, vocabulary_head
from tlora_megatron.ops.lora import tiling
from tlora_megatron.planner.candidate import Plan, misfit
from tlora_megatron.planner.cost import adapter_sizes, expert_adapters, memory
from tlora_megatron.planner.cost.memory import (
    COMMUNICATOR_BYTES,
    FRAGMENTATION,
    TERMS,
    chunks_in_flight,
    longest_batches,
    most_rows,
)
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.training.formats.hf_convert import check_layout

GIB = 2**30
RANKS = (4, 8, 16, 16, 24, 32, 64, 64)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def test_what_the_model_shares_with_the_run_is_the_same_there() -> None:
    assert adapter_sizes.LINEAR_TARGETS == sites.LINEAR_TARGETS
    assert adapter_sizes.SHARED_EXPERT_LINEARS == sites.SHARED_EXPERT_LINEARS
    assert vocabulary_head.ROWS_AT_ONCE == memory.HEAD_ROWS
    assert tiling.RANK_CHUNK == adapter_sizes.RANK_CHUNK
    assert arenas.RANK_ALIGNMENT == expert_adapters.ARENA_RANKS


def test_every_term_on_one_gpu() -> None:
    use = memory_use(SPEC, [job()], Plan(micro_batch_tokens=128), HARDWARE)
    layer = 100 * 240 + 3 * 100 * 200 + 2 * 100
    assert use.base_weights == 2 * (4 * layer + 2 * 1000 * 100 + 100)
    elements = 4 * 16 * (100 + 100)
    assert use.adapter_weights == 2 * elements
    assert use.adapter_gradients == 4 * elements
    assert use.adapter_states == 12 * elements
    stream, attention, mlp = 2 * 100 * 2 + 8, (200 + 40) * 2 + 40, 2 * 200 * 2
    adapted = 100 * 2 + (16 + 16) * 2  # the input of linear_qkv, and s
    assert use.activations == 128 * 4 * (stream + attention + mlp + adapted)
    assert use.workspace == 128 * (3 * 200 + 3 * 100) * 2
    head_bytes = 2 * (128 * (1000 + 100) + 4 * 128 * 100)
    assert use.logits == head_bytes - use.workspace
    assert use.collectives == 0
    assert use.fragmentation == pytest.approx(FRAGMENTATION * (use.activations + head_bytes))
    assert use.allocated_bytes == pytest.approx(sum(getattr(use, name) for name in TERMS[:7]))
    assert use.binding == "base_weights"


def test_an_fp8_base_takes_a_byte_a_weight_and_a_scale_a_column() -> None:
    plan = Plan(micro_batch_tokens=128)
    plain = memory_use(SPEC, [job()], plan, HARDWARE)
    quantised = replace(SPEC, fp8_linears=(("linear_qkv", 3), ("linear_fc1", 4)))
    use = memory_use(quantised, [job()], plan, HARDWARE)
    saved = 100 * (3 * 140 + 4 * 400) - 4 * (3 * 140 + 4 * 400)
    assert use.base_weights == plain.base_weights - saved
    assert use.workspace == plain.workspace + 128 * 400  # the codes of fc1's dy
    halves = memory_use(quantised, [job()], replace(plan, tp_size=2), HARDWARE)
    whole = memory_use(SPEC, [job()], replace(plan, tp_size=2), HARDWARE)
    assert halves.base_weights == whole.base_weights - saved / 2


def test_tensor_parallelism_cuts_weights_and_activations_but_not_the_residual_stream() -> None:
    plan = Plan(tp_size=2, micro_batch_tokens=128)
    use = memory_use(SPEC, [job()], plan, HARDWARE)
    layer = (100 * 240 + 3 * 100 * 200) / 2 + 2 * 100
    assert use.base_weights == 2 * (4 * layer + 2 * 500 * 100 + 100)
    # A of a column-parallel linear is whole on every rank, B is cut.
    assert use.adapter_gradients == 4 * 4 * 16 * (100 + 50)
    cut = (408 + 520 / 2 + 800 / 2) + 200 + 64
    assert use.activations == 128 * 4 * cut
    sharded = memory_use(SPEC, [job()], replace(plan, sequence_parallel=True), HARDWARE)
    assert sharded.activations == 128 * 4 * (cut - 200 - 100)
    saved = 2 * 4 * 4 * 16 * (100 + 50)  # both ranks' parts of a buffer
    assert use.collectives == COMMUNICATOR_BYTES + saved


def test_recompute_keeps_what_it_starts_from_and_needs_room_to_run_again() -> None:
    def use(recompute: str) -> memory.MemoryUse:
        plan = Plan(micro_batch_tokens=128, recompute=recompute)  # type: ignore[arg-type]
        return memory_use(SPEC, [job()], plan, HARDWARE)

    none, selective, full = use("none"), use("selective"), use("full")
    assert selective.activations == none.activations - 128 * 4 * (800 - 200)
    assert selective.workspace == none.workspace + 128 * 800
    assert full.activations == 128 * 4 * 200
    assert full.workspace == none.workspace + 128 * (408 + 520 + 264 + 800)


@pytest.mark.parametrize(
    ("pp", "vpp", "stage", "micro_batches", "chunks"),
    [(1, 1, 0, 9, 1), (4, 1, 0, 9, 4), (4, 1, 3, 9, 1), (4, 1, 0, 2, 2), (4, 2, 0, 9, 11)],
)
def test_chunks_in_flight(pp: int, vpp: int, stage: int, micro_batches: int, chunks: int) -> None:
    plan = Plan(pp_size=pp, vpp_size=vpp)
    assert chunks_in_flight(plan, stage, micro_batches) == chunks


def test_a_pipeline_is_as_full_as_its_fullest_stage() -> None:
    plan = Plan(pp_size=2, micro_batch_tokens=128)
    use = memory_use(SPEC, [job(batch_size=8)], plan, HARDWARE)
    boundary = 128 * 200
    assert use.stage == 0
    assert use.activations == 2 * (128 * 2 * 1992 + boundary)


@pytest.mark.parametrize("sizes", [{"dp_size": 4}, {"dp_size": 2, "cp_size": 2}])
def test_replicas_divide_states_and_gather_one_adapter(sizes: dict[str, int]) -> None:
    jobs = [job("small"), job("large", rank=32)]
    whole = Plan(micro_batch_tokens=128, pp_size=2, **sizes)
    before = memory_use(SPEC, jobs, whole, HARDWARE)
    use = memory_use(SPEC, jobs, replace(whole, shard_optimizer=True), HARDWARE)
    assert use.adapter_states == before.adapter_states / 4
    assert use.collectives == before.collectives + 4 * 2 * 32 * 200
    assert use.adapter_gradients == before.adapter_gradients
    assert use.adapter_weights == before.adapter_weights
    alone = Plan(micro_batch_tokens=128, shard_optimizer=True)
    assert memory_use(SPEC, jobs, alone, HARDWARE) == memory_use(
        SPEC, jobs, replace(alone, shard_optimizer=False), HARDWARE
    )


def test_rows_are_never_more_than_all_batches() -> None:
    assert most_rows(longest_batches([job(batch_size=3)]), Plan(micro_batch_tokens=8192)) == 384
    assert most_rows(longest_batches([job(batch_size=300)]), Plan(micro_batch_tokens=8192)) == 8192
    assert (
        most_rows(longest_batches([job(batch_size=1)]), Plan(cp_size=4, micro_batch_tokens=8192))
        == 512
    )


MEASURED = [
    JobLoad(name=f"job{i}", rank=rank, batch_size=4, lengths=LengthHistogram.single(512))
    for i, rank in enumerate(RANKS)
]


def test_measured_peaks_of_one_gpu_within_two_percent(repo: Path) -> None:
    rows = _rows(repo / "scripts/bench/results/end_to_end.csv")
    peaks = {r["mode"]: int(r["peak_bytes"]) for r in rows if r["jobs"] == "8 (batch 1-8)"}
    floor = memory_use(LLAMA_8B, [], Plan(), HARDWARE)
    together = memory_use(LLAMA_8B, MEASURED, Plan(), HARDWARE)
    assert floor.allocated_bytes == pytest.approx(peaks["frozen_floor"], rel=0.02)
    assert together.allocated_bytes == pytest.approx(peaks["super_model"], rel=0.02)


def test_measured_peaks_of_two_gpus_within_two_percent(repo: Path) -> None:
    jobs = [replace(j, targets=ATTENTION) if i % 3 == 2 else j for i, j in enumerate(MEASURED)]
    rows = _rows(repo / "scripts/bench/results/super_model.csv")
    last = {r["variant"]: float(r["peak_gib"]) for r in rows if r["tp"] == "2"}
    plan = Plan(tp_size=2, sequence_parallel=True)
    floor = memory_use(LLAMA_8B, [], plan, HARDWARE).allocated_bytes / GIB
    together = memory_use(LLAMA_8B, jobs, plan, HARDWARE).allocated_bytes / GIB
    assert floor == pytest.approx(last["floor"], rel=0.02)
    assert together == pytest.approx(last["round"], rel=0.02)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@given(
    tp=st.sampled_from((1, 2, 4)),
    pp=st.sampled_from((1, 2, 3, 4)),
    heads=st.sampled_from((8, 12)),
    layers=st.sampled_from((4, 6)),
)
def test_a_plan_fits_where_the_run_says_so(tp: int, pp: int, heads: int, layers: int) -> None:
    spec = replace(SPEC, num_layers=layers, num_heads=heads, num_kv_heads=4)
    plan = Plan(tp_size=tp, pp_size=pp, sequence_parallel=tp > 1)
    try:
        check_layout(spec, plan.layout)
    except ValueError:
        assert misfit(spec, plan) is not None
    else:
        assert misfit(spec, plan) is None
