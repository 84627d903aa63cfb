"""Length histograms, jobs' loads, and what a round holds beside what the packer makes of it."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.planner_case import job
from tlora_megatron.config.job import DataSpec, JobSpec, LoraSpec
from tlora_megatron.model.dispatch import ReplicaRate
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.rounds.load import ExpectedRounds, Part, part_of, spread_of
from tlora_megatron.planner.rounds.model import RoundModel
from tlora_megatron.planner.rounds.packer import Packer, RoundShape, timed_load
from tlora_megatron.planner.workload import JobLoad, LengthHistogram, check_jobs
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.packing import batch_items, round_up
from tlora_megatron.training.packing.portions import (
    RoundRule,
    fill_bins,
    fill_by_time,
    round_ends_ps,
)


def test_a_histogram_from_lengths_keeps_mean_and_longest() -> None:
    histogram = LengthHistogram.from_lengths([10, 10, 20, 40])
    assert histogram.pairs == ((10, 0.5), (20, 0.25), (40, 0.25))
    assert histogram.mean == 20
    assert histogram.longest == 40


def test_many_lengths_become_bins_with_the_longest_alone() -> None:
    lengths = list(range(1, 1001))
    histogram = LengthHistogram.from_lengths(lengths, most_bins=10)
    assert len(histogram.pairs) <= 10
    assert histogram.longest == 1000
    assert histogram.pairs[-1][1] == pytest.approx(0.001)
    assert histogram.mean == pytest.approx(statistics.fmean(lengths), rel=0.002)


def test_bins_keep_the_squares_of_a_heavy_tail() -> None:
    draw = random.Random(0)
    for share, longest, count in ((0.002, 65536, 2000), (0.002, 65536, 20000), (0.0, 16384, 5000)):
        short = (min(16384, max(16, int(draw.lognormvariate(5.9, 1.0)))) for _ in range(count))
        lengths = [longest if draw.random() < share else length for length in short]
        histogram = LengthHistogram.from_lengths(lengths)
        squares = statistics.fmean(length**2 for length in lengths)
        assert len(histogram.pairs) <= 64
        assert histogram.mean == pytest.approx(statistics.fmean(lengths), rel=0.002)
        assert histogram.variance + histogram.mean**2 == pytest.approx(squares, rel=0.01)


def test_lengths_over_a_limit_are_cut_to_it() -> None:
    clipped = LengthHistogram.from_counts([(10, 1), (30, 2), (50, 1)]).clipped(30)
    assert clipped.pairs == ((10, 0.25), (30, 0.75))


@pytest.mark.parametrize(
    ("pairs", "match"),
    [
        ((), "lengths must hold at least one length, got none"),
        (((0, 1.0),), "lengths must be positive and ascend, got 0"),
        (((5, 0.5), (5, 0.5)), "lengths must be positive and ascend, got 5"),
        (((5, -1.0), (6, 2.0)), r"shares of lengths must be in \(0, 1\], got -1"),
        (((5, 0.5), (6, 0.4)), "shares of lengths must add up to 1, got 0.9"),
    ],
)
def test_a_bad_histogram_is_refused(pairs: tuple[tuple[int, float], ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LengthHistogram(pairs)


def test_no_lengths_and_bad_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one length"):
        LengthHistogram.from_lengths([])
    with pytest.raises(ValueError, match="at least one length"):
        LengthHistogram.from_counts([])
    with pytest.raises(ValueError, match="counts of lengths must be positive, got -3"):
        LengthHistogram.from_counts([(5, -3)])


def test_spread_lengths_have_the_histograms_shares() -> None:
    histogram = LengthHistogram.from_counts([(10, 1), (20, 2), (80, 1)])
    drawn = list(itertools.islice(histogram.spread(), 64))
    assert [drawn.count(length) for length in (10, 20, 80)] == [16, 32, 16]


@pytest.mark.parametrize("batch_size", [1, 32])
def test_shuffled_lengths_have_the_shares_and_batches_that_differ(
    batch_size: int,
) -> None:
    histogram = LengthHistogram.from_counts([(10, 1), (20, 2), (80, 1)])
    drawn = list(itertools.islice(histogram.shuffled(3, batch_size), 1024))
    assert [drawn.count(length) for length in (10, 20, 80)] == [256, 512, 256]
    assert drawn != list(itertools.islice(histogram.shuffled(4, batch_size), 1024))
    sums = [sum(drawn[b : b + 8]) for b in range(0, 1024, 8)]
    independent = (8 * histogram.variance) ** 0.5
    assert statistics.pstdev(sums) == pytest.approx(independent, rel=0.15)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rank": 0}, "rank of job 'a' must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size of job 'a' must be at least 1"),
        ({"dropout": 1.0}, r"dropout of job 'a' must be in \[0, 1\)"),
        ({"target_share": 0.0}, r"target_share of job 'a' must be in \(0, 1\]"),
        ({"targets": ()}, "targets of job 'a' must name at least one linear"),
        ({"targets": ("q",)}, "targets of job 'a' must be among q_proj"),
    ],
)
def test_a_bad_load_is_refused(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        job(**changes)


def test_a_mix_needs_jobs_with_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="jobs must hold at least one job"):
        check_jobs([])
    with pytest.raises(ValueError, match="jobs must have unique names, got 'a' 2 times"):
        check_jobs([job("a"), job("b"), job("a")])


def test_a_load_takes_what_a_configured_job_says() -> None:
    lora = LoraSpec(rank=4, dropout=0.1, target_modules=("q_proj", "o_proj"))
    spec = JobSpec(name="x", data=DataSpec(train="t"), lora=lora, batch_size=3, max_steps=1)
    load = JobLoad.from_spec(spec, LengthHistogram.single(7), 0.5)
    assert (load.rank, load.dropout, load.targets) == (4, 0.1, ("q_proj", "o_proj"))
    assert (load.batch_size, load.batch_tokens, load.target_share) == (3, 21, 0.5)


def expected_rounds(jobs: list[JobLoad], **layout: int) -> ExpectedRounds:
    return RoundModel(jobs).expected(RoundShape(**layout))


def test_rounds_with_room_for_all_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    run_round = Packer.run_round
    monkeypatch.setattr(Packer, "run_round", lambda *args: packed.append(args) or run_round(*args))
    lengths = LengthHistogram.from_counts([(64, 3), (512, 1)])
    model = RoundModel([job(batch_size=8, lengths=lengths)])
    first = model.expected(RoundShape(4096, 4, 2))
    once = len(packed)
    for budget, dp_size, pp_size in ((8192, 4, 2), (4096, 8, 1), (4096, 2, 4), (65536, 1, 8)):
        other = model.expected(RoundShape(budget, dp_size, pp_size))
        assert other == replace(first, fullest=tuple((pp_size, n) for _, n in first.fullest))
    assert len(packed) == once
    model.expected(RoundShape(512, 1, 1))  # has to wait
    assert len(packed) > once


def test_every_job_gets_room_and_large_batches_step_in_the_end() -> None:
    # Each round holds two sequences; a batch of 1,000 takes more rounds than are looked at.
    many = [job(f"job{i}", batch_size=1000 if i == 0 else 1) for i in range(60)]
    load = expected_rounds(many, capacity=256, dp_size=1, pp_size=1).load(128)
    assert min(load.job_tokens) > 0
    assert 0 < load.steps[0] < 0.001
    assert load.tokens == pytest.approx(256)


def test_a_batch_that_hardly_fits_waits_for_room_now_and_then() -> None:
    # Ten sequences of 100 or 200, 1,500 rows in the mean, where 1,700 fit. Sums of more are 1,800
    # (45 of 1,024 draws), 1,900 (10), 2,000 (1): these take a second round for one to three more.
    lengths = LengthHistogram.from_counts([(100, 1), (200, 1)])
    mix = [job(batch_size=10, lengths=lengths)]
    waiting = expected_rounds(mix, capacity=1700, dp_size=1, pp_size=1).load(1)
    roomy = expected_rounds(mix, capacity=2000, dp_size=1, pp_size=1).load(1)
    assert roomy.steps[0] == 1
    assert roomy.tokens == pytest.approx(1500)
    assert waiting.steps[0] == pytest.approx(1 / (1 + 56 / 1024), abs=0.03)
    assert waiting.tokens == pytest.approx(1500 * waiting.steps[0], rel=0.02)
    assert roomy.sizes[0][1] > 0.6 > waiting.sizes[0][1]
    for load in (roomy, waiting):
        assert sum(share for share, _ in load.sizes) == pytest.approx(1)
        assert sum(share * size for share, size in load.sizes) == pytest.approx(1)


def test_large_batches_over_the_room_leave_rounds_with_their_rest() -> None:
    # One job, room for 970 of its 1,100 sequences: rounds of 970 and 130.
    large = [job(batch_size=1100, lengths=LengthHistogram.single(10))]
    load = expected_rounds(large, capacity=10000, dp_size=1, pp_size=1).load(1)
    assert load.steps[0] == pytest.approx(1 / 2)
    assert load.tokens == pytest.approx(5500)


_MIXES = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.lists(st.tuples(st.integers(8, 400), st.integers(1, 4)), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(mix=_MIXES, dp_size=st.sampled_from((1, 2)), pp_size=st.sampled_from((1, 2)))
def test_rounds_hold_what_the_real_packer_puts_into_them(
    mix: list[tuple[int, list[tuple[int, int]]]], dp_size: int, pp_size: int
) -> None:
    jobs = [
        job(f"job{i}", batch_size=batch, lengths=LengthHistogram.from_counts(dict(counts).items()))
        for i, (batch, counts) in enumerate(mix)
    ]
    model = RoundModel(jobs, looked_at=256)  # 24 rounds where batches wait, not hundreds
    expected = model.expected(RoundShape(512, dp_size, pp_size))
    num_rounds = len(expected.fullest)
    tokens, fullest, bins = _packed(jobs, 512, dp_size, pp_size, num_rounds)
    assert [count for count, _ in expected.fullest] == [count for count, _ in fullest]
    assert [rows for _, rows in expected.fullest] == [rows for _, rows in fullest]
    assert expected.drawn * sum(expected.job_tokens) == pytest.approx(tokens / num_rounds)
    load = expected.load(128)
    found = [[part_of(number) for number in own] for own in expected.bins]
    assert dp_size == 1 or tuple(map(tuple, found)) == bins
    padded = sum(n * round_up(r, 128) for n, r in fullest)
    assert load.rows * load.micro_batches * num_rounds * expected.drawn == pytest.approx(padded)


def _packed(
    jobs: list[JobLoad], capacity: int, dp_size: int, pp_size: int, num_rounds: int
) -> tuple[int, list[tuple[int, int]], tuple[tuple[Part, ...], ...]]:
    """Rows of all rounds; of each the micro-batches and the rows of the fullest one; and of each
    micro-batch rows and squares, in order of number and then of replica."""
    tokens, fullest, bins = 0, [], []
    for filled in packed(
        jobs, num_rounds, fill_bins, capacity=capacity, dp_size=dp_size, pp_size=pp_size
    ):
        loads = [sum(p.item.length for p in content) for content in filled.micro_batches]
        tokens += sum(loads)
        fullest.append((len(filled.replicas[0]), max(loads)))
        bins.append(
            tuple(
                (sum(p.item.length for p in own), sum(p.item.length**2 for p in own))
                for numbered in zip(*filled.replicas, strict=True)
                for own in numbered
            )
        )
    return tokens, fullest, tuple(bins)


def packed(
    jobs: list[JobLoad], num_rounds: int, fill: Callable[..., Any], **how: Any
) -> Iterator[Any]:
    """Rounds as the real packer fills them, where a job's next batch follows its last one."""
    streams = [j.lengths.shuffled(slot, j.batch_size) for slot, j in enumerate(jobs)]
    queues: list[list] = [[] for _ in jobs]
    for index in range(num_rounds):
        for slot, load in enumerate(jobs):
            if not queues[slot]:
                lengths = itertools.islice(streams[slot], load.batch_size)
                queues[slot] = batch_items([sequence_of(n) for n in lengths])
        filled, queues = fill(queues, first_slot=index, **how)
        yield filled


def sequence_of(rows: int) -> TokenSequence:
    is_target = np.ones(rows + 1, dtype=bool)
    is_target[0] = False
    return TokenSequence(np.zeros(rows + 1, dtype=np.int32), is_target)


def test_deep_rounds_are_those_of_the_dispatcher() -> None:
    lengths = LengthHistogram.from_counts([(100, 30), (400, 10), (1000, 4), (4000, 1)])
    jobs = [job(f"job{i}", batch_size=12 + 8 * i, lengths=lengths) for i in range(4)]
    load = timed_load(jobs, Plan(micro_batch_tokens=4096, dp_size=4, round_depth=2), 2e-4, 128)
    rates = tuple(ReplicaRate(token_ps=5000, square_ps=1, longest=4096) for _ in range(4))
    rule = RoundRule(rates=rates, depth=2, stages=(1,) * 4)
    tokens = micro_batches = 0
    busy = whole = 0.0
    for filled in packed(jobs, 200, fill_by_time, rule=rule):
        ends = round_ends_ps(filled, rates)
        tokens += filled.num_tokens
        micro_batches += sum(map(len, filled.replicas))
        busy, whole = busy + sum(ends), whole + 4 * max(ends)
    assert load.tokens == pytest.approx(tokens / 200, rel=0.03)
    assert load.micro_batches == pytest.approx(micro_batches / 200 / 4, rel=0.03)
    assert load.spread is not None
    assert load.spread.busy_share(2e-4) == pytest.approx(busy / whole, rel=0.03)


def test_the_slowest_replica_of_a_round_is_found_for_any_curvature() -> None:
    rounds_ = [[(10.0, 10.0), (8.0, 40.0), (7.0, 30.0)], [(6.0, 6.0), (6.0, 6.0), (9.0, 8.0)]]
    spread = spread_of(rounds_)
    assert spread.slowest == (((10.0, 10.0), (8.0, 40.0)), ((9.0, 8.0),))
    for curvature in (0.0, 0.05, 1.0):
        slowest = [max(n + curvature * q for n, q in parts) for parts in rounds_]
        assert spread.slowest_rows(curvature) == pytest.approx(sum(slowest) / 2)
        work = sum(n + curvature * q for parts in rounds_ for n, q in parts) / 6
        assert spread.busy_share(curvature) == pytest.approx(work / sum(slowest) * 2)
    assert spread.charged == 9.5


def test_large_rounds_are_shared_fairly() -> None:
    # 1,600 sequences of 100 and 10 of 1,000, room for 97 % of 64 micro-batches of 1,000: 520.8 of
    # the first and all of the second go into a round, and the fourth has what is left of the first.
    jobs = [
        job("many", batch_size=1600, lengths=LengthHistogram.single(100)),
        job("few", batch_size=10, lengths=LengthHistogram.single(1000)),
    ]
    load = expected_rounds(jobs, capacity=1000, dp_size=64, pp_size=1).load(1)
    assert load.job_sequences == (pytest.approx(400), pytest.approx(10))
    assert load.steps == (pytest.approx(1 / 4), pytest.approx(1))
    assert load.tokens == pytest.approx(50000)
    assert load.rows <= 1000
