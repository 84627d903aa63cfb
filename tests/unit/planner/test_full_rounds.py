"""Plans for Megatron-LM's trainer: full micro-batches, a fixed number of them, virtual stages."""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.bench.planner.cases import ATTENTION, RANKS
from tests.helpers.planner_case import H200, HARDWARE, LLAMA_8B, SPEC, job, step_cost
from tests.unit.planner.test_workload import packed
from tlora_megatron.config.job import MEGATRON_TARGETS
from tlora_megatron.planner.candidate import Plan, misfit
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.cost.step_terms import StepCost, full_capacity
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.rounds.model import RoundModel, full_sizes
from tlora_megatron.planner.search import search
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.training.packing.portions import fill_bins


class _Operation(NamedTuple):
    backward: bool
    micro_batch: int
    chunk: int


def makespan(
    forward_s: Sequence[Sequence[float]], backward_s: Sequence[Sequence[float]], count: int
) -> float:
    """Time of `count` micro-batches in 1F1B, interleaved if stages have several chunks.

    Args:
        forward_s: by stage, seconds of each of its model chunks.
    """
    num_stages, num_chunks = len(forward_s), len(forward_s[0])
    queues = [_order(stage, num_stages, num_chunks, count) for stage in range(num_stages)]
    ends: dict[tuple[int, _Operation], float] = {}
    clocks, places = [0.0] * num_stages, [0] * num_stages
    left = sum(map(len, queues))
    while left:
        before = left
        for stage, queue in enumerate(queues):
            while places[stage] < len(queue):
                operation = queue[places[stage]]
                inputs = _inputs(stage, operation, num_stages, num_chunks)
                if any(given not in ends for given in inputs):
                    break
                begin = max([clocks[stage], *(ends[given] for given in inputs)])
                times = backward_s if operation.backward else forward_s
                clocks[stage] = ends[stage, operation] = begin + times[stage][operation.chunk]
                places[stage] += 1
                left -= 1
        assert left < before, "stages wait for each other"
    return max(clocks)


def _order(stage: int, num_stages: int, num_chunks: int, count: int) -> list[_Operation]:
    """A stage's operations as `forward_backward_pipelining_with(out)_interleaving` has them."""
    total = count * num_chunks
    if num_chunks == 1:
        warm_up = num_stages - stage - 1
        table = [(micro_batch, 0) for micro_batch in range(count)]
    else:
        warm_up = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
        begins = range(0, count, num_stages)
        groups = [range(begin, begin + num_stages) for begin in begins]
        table = [(m, chunk) for group in groups for chunk in range(num_chunks) for m in group]
    warm_up = min(warm_up, total)
    forward = [_Operation(False, *entry) for entry in table]
    backward = [_Operation(True, m, num_chunks - 1 - chunk) for m, chunk in table]
    steady = zip(forward[warm_up:], backward, strict=False)
    return [
        *forward[:warm_up],
        *itertools.chain.from_iterable(steady),
        *backward[total - warm_up :],
    ]


def _inputs(
    stage: int, operation: _Operation, num_stages: int, num_chunks: int
) -> list[tuple[int, _Operation]]:
    """The operations whose tensors one needs, with their stages."""
    is_backward, _, chunk = operation
    step = 1 if is_backward else -1
    if 0 <= stage + step < num_stages:
        return [(stage + step, operation)]
    if 0 <= chunk + step < num_chunks:
        return [((stage + step) % num_stages, operation._replace(chunk=chunk + step))]
    return [(stage, operation._replace(backward=False))] if is_backward else []


MIXED = LengthHistogram.from_counts([(256, 5), (512, 3), (1024, 1), (2048, 1)])
MEGATRON = SearchSpace(runs_in="megatron")


@settings(max_examples=20, deadline=None)
@given(
    batches=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    dp_size=st.sampled_from((1, 2)),
    count=st.integers(1, 5),
)
def test_full_rounds_hold_what_the_real_packer_puts_into_them(
    batches: list[int], dp_size: int, count: int
) -> None:
    lengths = LengthHistogram.from_counts([(40, 3), (200, 1)])
    jobs = [job(f"job{i}", batch_size=n, lengths=lengths) for i, n in enumerate(batches)]
    plan = Plan(dp_size=dp_size, micro_batch_tokens=512, num_micro_batches=count)
    load = RoundModel(jobs).full_load(plan, 480)
    assert (load.micro_batches, load.rows) == (count, 512)
    assert load.filled == pytest.approx(load.tokens / count / dp_size)
    how = {"capacity": 480, "dp_size": dp_size, "pp_size": 1, "num_micro_batches": count}
    rounds = list(packed(jobs, 200, fill_bins, **how))
    tokens = statistics.fmean(filled.num_tokens for filled in rounds)
    assert load.tokens == pytest.approx(tokens, rel=0.06)
    if dp_size == 1:
        assert load.spread is None
        return
    assert load.spread is not None
    # Replicas compute equally many rows; the one with the largest squares is waited for.
    assert load.spread.slowest_rows(0.0) == load.spread.charged_rows(0.0) == 512 * count
    squares = statistics.fmean(
        max(sum(p.item.length**2 for own in replica for p in own) for replica in filled.replicas)
        for filled in rounds
    )
    waited = load.spread.slowest_rows(1.0) - 512 * count
    assert waited == pytest.approx(squares, rel=0.15)


def test_padding_is_computed_like_rows_of_one_more_sequence() -> None:
    """One sequence of 128 in 512 rows: GEMMs of 512, attention of 128 and of 384, LoRA of 128."""
    paid = replace(HARDWARE, lora=replace(HARDWARE.lora, forward_rank_s=1e-9))
    plan = Plan(micro_batch_tokens=512, num_micro_batches=1)
    full, exact = (step_cost(SPEC, [job()], p, paid) for p in (plan, Plan(micro_batch_tokens=512)))
    assert exact.load.rows == full.load.tokens == 128
    assert full.load.filled_share == 0.25
    assert full.gemm_s == pytest.approx(4 * exact.gemm_s)
    assert full.lora_s == pytest.approx(exact.lora_s)
    pairs = 128 * 129 / 2
    assert full.attention_s == pytest.approx(exact.attention_s * (1 + 384 * 385 / 2 / pairs))
    memory = MemoryModel(SPEC, [job()], HARDWARE)
    ratio = memory.use(plan).activations / memory.use(Plan(micro_batch_tokens=512)).activations
    assert ratio == pytest.approx(4)


def test_nano_batches_keep_rows_of_a_full_micro_batch_for_their_padding() -> None:
    plan = Plan(tp_size=2, micro_batch_tokens=8192, num_micro_batches=1)
    assert full_capacity(plan, 100) == 8192
    assert full_capacity(replace(plan, num_nano_batches=2), 100) == 8192 - 2 * 127
    assert full_capacity(replace(plan, num_nano_batches=2), 8000) == 8192
    small = replace(plan, num_nano_batches=4, micro_batch_tokens=1024)
    assert full_capacity(small, 100) == 1024 - 128


def test_the_reference_has_the_bubbles_that_are_counted_by_hand() -> None:
    """Stages of 1 s forward and 2 s backward; 2 stages wait 3 s, in halves 1.5 s."""

    def played(stages: int, chunks: int, count: int, last: float = 0.0) -> float:
        forward, backward = ([[t / chunks] * chunks for _ in range(stages)] for t in (1.0, 2.0))
        forward[-1][-1] += last
        return makespan(forward, backward, count)

    assert played(2, 1, 4) == 4 * 3 + 3
    assert played(2, 2, 4) == 4 * 3 + 1.5
    assert played(4, 2, 4) == pytest.approx(4 * 3 + 3 * 3 / 2)
    assert played(4, 1, 2) == 2 * 3 + 3 * 3  # fewer than stages
    assert played(2, 1, 4, last=1.0) == 4 * 4 + 3


@pytest.mark.parametrize(
    ("pp_size", "vpp_size", "count"),
    [(2, 1, 4), (4, 1, 3), (2, 2, 2), (2, 2, 8), (2, 5, 4), (4, 2, 4), (4, 5, 16)],
)
def test_times_are_those_of_the_schedule_played_through(
    pp_size: int, vpp_size: int, count: int
) -> None:
    """The last stage has the head; it takes a fifth of a stage."""
    spec = replace(SPEC, num_layers=20, vocab_size=1600)
    plan = Plan(pp_size=pp_size, vpp_size=vpp_size, micro_batch_tokens=256, num_micro_batches=count)
    mix = [job(batch_size=2 * count)]
    fast = replace(
        HARDWARE,
        intra_node=replace(HARDWARE.intra_node, bytes_per_s=1e18),
        stream_bytes_per_s=1e18,
    )
    cost = step_cost(spec, mix, plan, fast)
    whole = step_cost(spec, mix, replace(plan, pp_size=1, vpp_size=1), fast)
    layers = (whole.gemm_s + whole.attention_s) / count / pp_size
    chunk = [layers / vpp_size] * vpp_size
    forward, backward = (
        [[share * own for own in chunk] for _ in range(pp_size)] for share in (1 / 3, 2 / 3)
    )
    head = whole.head_s / count
    assert 0.05 < head / layers < 0.9
    forward[-1][-1] += head / 3
    backward[-1][-1] += head * 2 / 3
    expected = makespan(forward, backward, count)
    assert cost.step_time_s == pytest.approx(expected, rel=0.01 if vpp_size > 1 else 1e-6)


def test_virtual_stages_halve_the_bubble_and_want_whole_groups() -> None:
    mix = [job(batch_size=8)]

    def cost(vpp_size: int) -> StepCost:
        plan = Plan(pp_size=2, vpp_size=vpp_size, micro_batch_tokens=256, num_micro_batches=4)
        return step_cost(SPEC, mix, plan, HARDWARE)

    plain, virtual = cost(1), cost(2)
    hops = virtual.pp_comm_s - plain.pp_comm_s
    assert hops == pytest.approx(plain.pp_comm_s)
    assert virtual.bubble_s == pytest.approx((plain.bubble_s + hops / 4) / 2)
    odd = Plan(pp_size=2, vpp_size=2, micro_batch_tokens=256, num_micro_batches=3)
    assert misfit(SPEC, odd) == "3 micro-batches are no multiple of PP 2"
    assert misfit(SPEC, replace(odd, vpp_size=1)) is None


def test_rounds_are_of_a_size_that_all_batches_fill() -> None:
    """Batches of 65,536 rows; virtual stages take groups of 4 micro-batches."""
    jobs = [job(batch_size=128, lengths=LengthHistogram.single(512))]
    layout = Plan(pp_size=4, dp_size=2)
    tried = [2048, 3072, 8192, 16384]
    plain, virtual = (
        {(n, m) for n, m in full_sizes(RoundModel(jobs), jobs, own, tried)}
        for own in (layout, replace(layout, vpp_size=2))
    )
    assert {(2048, 16), (3072, 10), (3072, 11), (8192, 4), (16384, 2)} <= plain
    assert {(2048, 16), (3072, 8), (3072, 12), (8192, 4)} <= virtual
    assert all(m % 4 == 0 for _, m in virtual)
    assert all(n * m * 2 <= 1.5 * 128 * 512 for n, m in plain | virtual)
    # What just holds all: 128 sequences in 8 or 16 micro-batches, whole ones.
    assert (8192, 4) in virtual
    assert (4096, 8) in virtual
    assert full_sizes_of(jobs, layout, [3072]) == {(3072, 10), (3072, 11)}


def test_without_a_pipeline_one_micro_batch_is_enough_for_a_replica() -> None:
    jobs = [job(batch_size=128, lengths=LengthHistogram.single(512))]
    assert {m for _, m in full_sizes_of(jobs, Plan(), [2048, 3072])} == {1}


def full_sizes_of(jobs: list[JobLoad], layout: Plan, tried: list[int]) -> set[tuple[int, int]]:
    return {(size, count) for size, count in full_sizes(RoundModel(jobs), jobs, layout, tried)}


def test_each_program_is_offered_what_it_runs_in_its_own_time() -> None:
    jobs = [job(f"job{i}", batch_size=8, lengths=MIXED) for i in range(3)]
    every = search(SPEC, jobs, HARDWARE, 4).plans
    ours = search(SPEC, jobs, HARDWARE, 4, SearchSpace(runs_in="train")).plans
    theirs = search(SPEC, jobs, HARDWARE, 4, MEGATRON).plans
    assert {p.plan for p in every} == {p.plan for p in (*ours, *theirs)}
    assert all(p.plan.num_micro_batches is None and p.plan.vpp_size == 1 for p in ours)
    assert {p.plan.runs_in for p in theirs} == {("megatron",)}
    assert {p.plan.vpp_size for p in theirs} == {1, 2}
    for found in theirs:
        plan, load = found.plan, found.cost.load
        assert load.rows == plan.micro_batch_tokens
        assert load.micro_batches == plan.num_micro_batches
        assert plan.vpp_size == 1 or plan.num_micro_batches % plan.pp_size == 0


def test_measured_iterations_of_megatron_lm_take_what_is_predicted(
    repo: Path,
) -> None:
    """8B on 1 and 2 H200s, 8,192 rows, eight jobs on texts of 256 to 1,024 tokens."""
    lengths = LengthHistogram.from_counts((n, 1) for n in range(256, 1024, 32))
    jobs = [
        JobLoad(
            name=f"job{i}",
            rank=rank,
            batch_size=16,
            lengths=lengths,
            target_share=0.5,
            targets=ATTENTION if i % 3 == 2 else MEGATRON_TARGETS,
        )
        for i, rank in enumerate(RANKS)
    ]
    model = CostModel(LLAMA_8B, jobs, H200)
    with (repo / "scripts/bench/results/flag_speed.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == "flag"]
    rows = [row for row in rows if (row["impl"], row["precision"]) == ("local", "bf16")]
    assert {row["layout"] for row in rows} == {"TP1", "TP2+SP", "TP2 nano 2"}
    for row in rows:
        own = float(row["tokens"]) / len(jobs)
        sequences = own / lengths.mean
        load = RoundLoad(
            micro_batches=1,
            rows=int(row["rows"]),
            job_tokens=(own,) * len(jobs),
            job_sequences=(sequences,) * len(jobs),
            steps=(sequences / 16,) * len(jobs),
            filled=float(row["tokens"]),
        )
        plan = Plan(
            tp_size=int(row["world"]),
            sequence_parallel="SP" in row["layout"],
            micro_batch_tokens=int(row["rows"]),
            num_micro_batches=1,
            num_nano_batches=1 + ("nano" in row["layout"]),
        )
        error = 1e3 * model.step_cost(plan, load).step_time_s / float(row["step_ms"]) - 1
        assert -0.07 < error < 0.02, row["layout"]
