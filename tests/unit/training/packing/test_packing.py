"""Packing: every sequence exactly once, budgets kept, rooms shared, tensors by the definition."""

from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora_megatron.model.micro_batches import choose_num_micro_batches
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.packing import Item, Placed, Round, batch_items, pack
from tlora_megatron.training.packing.portions import fill_bins

CPU = torch.device("cpu")
CAPACITY = 20
LENGTHS = st.lists(
    st.lists(st.integers(1, CAPACITY), max_size=7), min_size=1, max_size=5
)  # rows of each sequence, by slot
LAYOUTS = st.tuples(st.integers(1, 3), st.integers(1, 3))  # dp_size, pp_size
fast = settings(max_examples=80, deadline=None)


def sequence(num_rows: int, *, seed: int = 0, targets: int | None = None) -> TokenSequence:
    """`num_rows + 1` random tokens; the last `targets` of them are predicted, by default half."""
    tokens = np.random.default_rng(seed).integers(1, 99, num_rows + 1).astype(np.int32)
    is_target = np.zeros(num_rows + 1, dtype=bool)
    is_target[-(targets or (num_rows + 1) // 2) :] = True
    return TokenSequence(tokens, is_target)


def queues_of(lengths: list[list[int]]) -> list[list[Item]]:
    """A queue a slot with sequences of so many rows."""
    return [[Item(sequence(n), i, 0, 1.0) for i, n in enumerate(queue)] for queue in lengths]


def ids(bins: Round) -> list[tuple[int, int]]:
    """(slot, index) of everything in the bins."""
    return [(p.slot, p.item.index) for contents in bins.micro_batches for p in contents]


@given(LENGTHS, LAYOUTS, st.integers(0, 9))
@fast
def test_a_round_is_full_within_its_budget_and_loses_nothing(
    lengths: list[list[int]], layout: tuple[int, int], first_slot: int
) -> None:
    dp_size, pp_size = layout
    queues = queues_of(lengths)
    bins, left = fill_bins(
        queues, capacity=CAPACITY, dp_size=dp_size, pp_size=pp_size, first_slot=first_slot
    )
    assert len(bins.replicas) == dp_size
    assert len({len(replica) for replica in bins.replicas}) == 1
    for contents in bins.micro_batches:
        assert sum(p.item.length for p in contents) <= CAPACITY
        order = [(p.slot, p.item.index) for p in contents]
        assert order == sorted(order)
    remaining = [(slot, item.index) for slot, queue in enumerate(left) for item in queue]
    everything = [(slot, item.index) for slot, queue in enumerate(queues) for item in queue]
    assert sorted(ids(bins) + remaining) == everything
    assert [[item.length for item in queue] for queue in queues] == lengths
    lightest = min(sum(p.item.length for p in contents) for contents in bins.micro_batches)
    for queue in left:
        if queue:
            assert lightest + max(item.length for item in queue) > CAPACITY
    first = first_slot % len(lengths)
    assert not lengths[first] or first in {slot for slot, _ in ids(bins)}


@given(LENGTHS, st.integers(0, 9))
@fast
def test_room_for_the_longest_lets_every_slot_go(lengths: list[list[int]], first_slot: int) -> None:
    capacity = sum(max(queue, default=0) for queue in lengths) or 1
    bins, _ = fill_bins(
        queues_of(lengths), capacity=capacity, dp_size=1, pp_size=1, first_slot=first_slot
    )
    assert {slot for slot, _ in ids(bins)} == {s for s, queue in enumerate(lengths) if queue}


def test_the_longest_goes_while_a_micro_batch_is_empty() -> None:
    bins, left = fill_bins(queues_of([[3, 20, 5]]), capacity=20, dp_size=1, pp_size=1)
    assert ids(bins) == [(0, 1)]
    assert [item.length for item in left[0]] == [5, 3]


def test_a_small_batch_steps_every_round_beside_a_large_one() -> None:
    large = queues_of([[5] * 8])[0]
    steps, rounds = 0, 0
    while large:
        small = queues_of([[5]])[0]
        bins, (large, small) = fill_bins(
            [large, small], capacity=15, dp_size=1, pp_size=1, first_slot=rounds
        )
        steps += not small
        rounds += 1
        assert len(ids(bins)) == 3 or not large
    assert (steps, rounds) == (4, 4)


@given(st.lists(st.lists(st.integers(1, 40), unique=True, max_size=6), min_size=1, max_size=4),
       LAYOUTS, st.randoms())  # fmt: skip
@fast
def test_the_order_of_a_queue_does_not_matter(
    lengths: list[list[int]], layout: tuple[int, int], draw: object
) -> None:
    queues = queues_of(lengths)
    shuffled = [draw.sample(queue, len(queue)) for queue in queues]  # type: ignore[attr-defined]
    kwargs = {"capacity": 40, "dp_size": layout[0], "pp_size": layout[1]}
    assert ids(fill_bins(queues, **kwargs)[0]) == ids(fill_bins(shuffled, **kwargs)[0])


RECORDED = {
    (1, 1): "c63b8ff21e979c20", (2, 1): "c180d40322c60a9f", (3, 1): "5133aae1cdf1e38a",
    (8, 1): "3ae6ba71fb51baf5", (1, 2): "74819a455ca3d293", (2, 2): "c9421b4af43ad977",
}  # fmt: skip
"""By dp_size and pp_size the digest of all rounds of 40 drawn mixes, balanced by tokens. A run's
bits follow from which sequences meet, so they must stay."""


@pytest.mark.parametrize("layout", RECORDED)
def test_rounds_of_one_micro_batch_stay_as_recorded(layout: tuple[int, int]) -> None:
    found = [_drawn_rounds(seed, *layout) for seed in range(40)]
    digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()
    assert digest[:16] == RECORDED[layout]


def _drawn_rounds(seed: int, dp_size: int, pp_size: int) -> list[object]:
    draw = random.Random(seed)
    left = queues_of(
        [
            [draw.randint(1, 60) for _ in range(draw.randint(0, 12))]
            for _ in range(draw.randint(1, 5))
        ]
    )
    found: list[object] = []
    while any(left):
        filled, left = fill_bins(
            left, capacity=64, dp_size=dp_size, pp_size=pp_size, first_slot=len(found)
        )
        held = [[[(p.slot, p.item.index) for p in m] for m in own] for own in filled.replicas]
        found.append(held)
    return found


def test_number_of_micro_batches_fills_the_pipeline_and_no_more() -> None:
    for pp_size in range(1, 5):
        for total in range(0, 500, 7):
            number = choose_num_micro_batches(total, 16, 2, pp_size)
            if pp_size == 1:
                assert number == 1
                continue
            assert pp_size <= number <= 4 * pp_size
            if pp_size < number:
                assert 32 * (number - 1) < total
            if number < 4 * pp_size:
                assert 32 * number >= total


@given(st.lists(st.tuples(st.integers(2, 9), st.integers(1, 9)), min_size=1, max_size=6))
@fast
def test_a_batch_weighs_its_target_tokens_equally(shapes: list[tuple[int, int]]) -> None:
    sequences = [sequence(n, targets=min(t, n)) for n, t in shapes]
    items = batch_items(sequences)
    targets = sum(min(t, n) for n, t in shapes)
    assert [item.index for item in items] == list(range(len(shapes)))
    assert [item.length for item in items] == [n for n, _ in shapes]
    assert [item.first_token for item in items] == [sum(n for n, _ in shapes[:i])
                                                    for i in range(len(shapes))]  # fmt: skip
    total = sum(item.weight * item.sequence.is_target.sum() for item in items)
    assert total == pytest.approx(1.0)
    assert {item.weight for item in items} == {1.0 / targets}


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_tensors_of_a_micro_batch_by_the_definition(cp_size: int) -> None:
    lengths = [[7, 3], [], [11]]
    placed = [
        Placed(slot, Item(sequence(n, seed=n), i, 100 * slot, 0.25 * (slot + 1)))
        for slot, queue in enumerate(lengths)
        for i, n in enumerate(queue)
    ]
    expected = []
    for slot, (tokens, is_target), weight in [(p.slot, p.item.sequence, p.item.weight)
                                              for p in placed]:  # fmt: skip
        for t in range(len(tokens) - 1):
            predicted = bool(is_target[t + 1])
            label = int(tokens[t + 1]) if predicted else 0
            expected.append((int(tokens[t]), label, weight if predicted else 0.0, slot))
    expected += [(0, 0, 0.0, 3)] * (32 - len(expected))
    seen = set()
    for cp_rank in range(cp_size):
        batch = pack(
            placed, num_tokens=32, num_slots=3, dropout_keys=(1, 2, 3), cp_rank=cp_rank,
            cp_size=cp_size, device=CPU,
        )  # fmt: skip
        assert (batch.tokens.dtype, batch.labels.dtype) == (torch.int64, torch.int64)
        assert batch.weights.dtype == torch.float32
        assert batch.tokens.shape == batch.labels.shape == (1, 32 // cp_size)
        slots = batch.view.rows.row_slots(CPU)
        for row, packed in enumerate(batch.view.local_rows().tolist()):
            actual = (
                int(batch.tokens[0, row]),
                int(batch.labels[0, row]),
                float(batch.weights[row]),
                int(slots[row]),
            )
            assert actual == expected[packed]
            seen.add(packed)
    assert seen == set(range(32))
