"""Portions: what a job runs together, where and when depends on its own sequences alone."""

from __future__ import annotations

import math
import random

import pytest

from tests.unit.training.packing.test_packing import queues_of
from tlora_megatron.training.packing.packing import Item, Round
from tlora_megatron.training.packing.portions import ReplicaRoom, fill_bins, next_portion


def items(lengths: list[int]) -> list[Item]:
    return queues_of([lengths])[0]


def rounds(queues: list[list[Item]], *, portion_tokens: int | None, **shape: int) -> list[Round]:
    """All rounds until every queue is empty."""
    found = []
    portions = [portion_tokens] * len(queues)
    while any(queues):
        bins, queues = fill_bins(queues, first_slot=len(found), portion_tokens=portions, **shape)
        found.append(bins)
    return found


def slot_history(rounds_: list[Round], slot: int) -> list[tuple[tuple[int, ...], ...]]:
    """The sequences of a slot on every rank, portion by portion in the order of their sums."""
    history = []
    for bins in rounds_:
        before = -1
        for ranks in zip(*bins.replicas, strict=True):
            mine = [[p for p in placed if p.slot == slot] for placed in ranks]
            for portion in sorted({p.portion for placed in mine for p in placed}):
                assert portion == before + 1, "portions come in order"
                before = portion
                history.append(
                    tuple(
                        tuple(p.item.index for p in placed if p.portion == portion)
                        for placed in mine
                    )
                )
    return history


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("dp_size", "pp_size"), [(1, 1), (2, 1), (3, 2)])
def test_portions_are_the_same_alone_and_in_company(seed: int, dp_size: int, pp_size: int) -> None:
    draw = random.Random(seed)
    queues = [items([draw.randint(1, 40) for _ in range(draw.randint(1, 9))]) for _ in range(5)]
    shape = {"portion_tokens": 25, "capacity": 60, "dp_size": dp_size, "pp_size": pp_size}
    together = rounds(queues, **shape)
    for slot, queue in enumerate(queues):
        assert slot_history(together, slot) == slot_history(rounds([queue], **shape), 0)


@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_runs_once_and_nothing_overflows(seed: int) -> None:
    draw = random.Random(seed)
    queues = [items([draw.randint(1, 50) for _ in range(draw.randint(0, 9))]) for _ in range(4)]
    queues.append(items([3]))
    done = rounds(queues, portion_tokens=20, capacity=50, dp_size=2, pp_size=1)
    for bins in done:
        for placed in bins.micro_batches:
            assert sum(p.item.length for p in placed) <= 50
            keys = [(p.slot, p.portion, p.item.index) for p in placed]
            assert keys == sorted(keys)
    for slot, queue in enumerate(queues):
        ran = [
            p.item.index for bins in done for c in bins.micro_batches for p in c if p.slot == slot
        ]
        assert sorted(ran) == list(range(len(queue)))


def test_small_jobs_share_a_round() -> None:
    done = rounds([items([10, 10]) for _ in range(4)], portion_tokens=25, capacity=40, dp_size=2,
                  pp_size=1)  # fmt: skip
    assert len(done) == 1


def test_a_slot_s_second_portion_comes_after_every_other_slot_s_first() -> None:
    queues = [items([20, 20, 20, 20]), items([20, 20]), items([20, 20, 20])]
    bins, left = fill_bins(
        queues, portion_tokens=[20] * 3, capacity=100, dp_size=1, pp_size=1, first_slot=1
    )
    held = [(p.slot, p.portion) for p in bins.replicas[0][0]]
    assert held == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [len(queue) for queue in left] == [3, 0, 1]


def test_a_pipeline_s_micro_batches_are_filled_evenly_and_in_order() -> None:
    queues = [items([10] * 12), items([10] * 4)]
    bins, left = fill_bins(queues, portion_tokens=[10, 10], capacity=100, dp_size=1, pp_size=4)
    assert not any(left)
    assert [sum(p.item.length for p in content) for content in bins.micro_batches] == [40] * 4
    for slot in (0, 1):
        order = [p.portion for content in bins.micro_batches for p in content if p.slot == slot]
        assert order == list(range(len(queues[slot])))


def test_sequences_without_portions_take_the_room_beside() -> None:
    queues = [items([10, 10, 10]), items([15, 5, 30])]
    bins, left = fill_bins(queues, portion_tokens=[10, None], capacity=60, dp_size=1, pp_size=1)
    held = [(p.slot, p.portion, p.item.length) for p in bins.replicas[0][0]]
    assert held == [(0, 0, 10), (0, 1, 10), (0, 2, 10), (1, None, 30)]
    assert [[item.length for item in queue] for queue in left] == [[], [15, 5]]


def lognormal_batches(draw: random.Random, count: int) -> list[list[int]]:
    """Jobs' batches of 4 to 32 sequences, lognormal around means of 150 to 600 tokens."""
    batches = []
    for _ in range(count):
        mean, size = draw.uniform(150, 600), draw.randint(4, 32)
        lengths = [draw.lognormvariate(math.log(mean) - 0.18, 0.6) for _ in range(size)]
        batches.append([min(2048, max(8, round(length))) for length in lengths])
    return batches


def used_room(jobs: int, portion_tokens: int, seed: int) -> float:
    """Rows used of micro-batches of 8,192, where every job begins a new batch when one is done."""
    draw = random.Random(seed)
    batches = lognormal_batches(draw, jobs)
    queues: list[list[Item]] = [[] for _ in range(jobs)]
    used = 0
    for number in range(60):
        for slot, lengths in enumerate(batches):
            queues[slot] = queues[slot] or items(draw.sample(lengths, len(lengths)))
        bins, queues = fill_bins(
            queues, portion_tokens=[portion_tokens] * jobs, capacity=8192, dp_size=1, pp_size=1,
            first_slot=number,
        )  # fmt: skip
        used += bins.num_tokens
    return used / (60 * 8192)


@pytest.mark.parametrize(("jobs", "least"), [(3, 0.85), (8, 0.95), (16, 0.96)])
def test_several_portions_in_a_micro_batch_leave_little_room(jobs: int, least: float) -> None:
    """One portion of a job in each round used 29 % with 3 jobs, 80 % with 8."""
    found = [used_room(jobs, 1024, seed) for seed in range(4)]
    assert sum(found) / len(found) >= least, found


def test_a_sequence_longer_than_a_portion_is_one_with_what_fits_beside_it() -> None:
    portion, rest = next_portion(
        items([4, 30, 29, 2]), portion_tokens=8, rooms=[ReplicaRoom(64)] * 2
    )
    assert [[i.length for i in rank] for rank in portion] == [[30], [29]]
    assert [i.length for i in rest] == [4, 2]
