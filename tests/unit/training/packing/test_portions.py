"""Portions: what a job runs together, where and when depends on its own sequences alone."""

from __future__ import annotations

import random

import pytest
import torch

from tlora_megatron.training.data.job_data import TokenSequence
from tlora_megatron.training.packing.packing import Bins, Item
from tlora_megatron.training.packing.portions import fill_with_portions, next_portion


def items(lengths: list[int]) -> list[Item]:
    sequences = [
        TokenSequence(tokens=torch.zeros(n + 1).numpy(), is_target=torch.ones(n + 1).numpy())
        for n in lengths
    ]
    return [Item(sequence, i, 0, 1.0) for i, sequence in enumerate(sequences)]


def rounds(queues: list[list[Item]], **shape: int) -> list[Bins]:
    """All rounds until every queue is empty."""
    found = []
    while any(queues):
        bins, queues = fill_with_portions(queues, first_slot=len(found), **shape)
        found.append(bins)
    return found


def slot_history(rounds_: list[Bins], slot: int) -> list[list[tuple[int, ...]]]:
    """The sequences of a slot on every rank, by rounds in which it takes part."""
    history = []
    for bins in rounds_:
        ranks = [
            tuple(p.item.index for placed in bins.of_rank(rank) for p in placed if p.slot == slot)
            for rank in range(bins.dp_size)
        ]
        if any(ranks):
            history.append(ranks)
    return history


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("dp_size", "pp_size"), [(1, 1), (2, 1), (3, 2)])
def test_a_job_s_portions_are_the_same_alone_and_in_company(
    seed: int, dp_size: int, pp_size: int
) -> None:
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
        for placed in bins.contents:
            assert sum(p.item.length for p in placed) <= 50
            assert [(p.slot, p.item.index) for p in placed] == sorted(
                (p.slot, p.item.index) for p in placed
            )
    for slot, queue in enumerate(queues):
        ran = [p.item.index for bins in done for c in bins.contents for p in c if p.slot == slot]
        assert sorted(ran) == list(range(len(queue)))


def test_small_jobs_share_a_round() -> None:
    done = rounds([items([10, 10]) for _ in range(4)], portion_tokens=25, capacity=40, dp_size=2,
                  pp_size=1)  # fmt: skip
    assert len(done) == 1


def test_a_sequence_longer_than_a_portion_is_one_with_what_fits_beside_it() -> None:
    portion, rest = next_portion(items([4, 30, 29, 2]), portion_tokens=8, dp_size=2)
    assert [[i.length for i in rank] for rank in portion] == [[30], [29]]
    assert [i.length for i in rest] == [4, 2]
