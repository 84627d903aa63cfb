"""Rounds cut by recompute: nothing is lost, budgets are kept, none has more than it needs."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.training.packing.test_packing import sequence
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.training.packing.packing import Item, MicroBatch, Placed, Round, pack
from tlora_megatron.training.packing.portions import (
    cut_by_recompute,
    cut_round,
    with_recompute,
)

TABLE = RecomputeTable((("none", 16), ("selective", 32), ("full", 64)))
fast = settings(max_examples=60, deadline=None)


@given(st.lists(st.integers(1, 70), max_size=40), st.integers(0, 3))
@fast
def test_micro_batches_are_as_light_as_their_sequences(lengths: list[int], padding: int) -> None:
    parts = cut_by_recompute(lengths, TABLE, padding)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    order = []
    for part in parts:
        rows = sum(lengths[i] for i in part)
        needed = {TABLE.of(lengths[i] + padding) for i in part}
        assert needed == {TABLE.of(rows + padding)}
        assert rows + padding <= 64 or len({lengths[i] for i in part}) == len(part) == 1
        order.append(TABLE.of(rows + padding))
    heaviest_first = [name for name, _ in reversed(TABLE.most_rows)]
    assert order == sorted(order, key=heaviest_first.index)


def test_short_sequences_go_apart_from_long_ones_and_fill_few_micro_batches() -> None:
    # 64 rows in one micro-batch, or 40 in one and 24 in two.
    assert cut_by_recompute([40, 6, 6, 6, 6], TABLE) == [[0], [1, 3], [2, 4]]
    assert cut_by_recompute([], TABLE) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=30
    )
)
@fast
def test_portions_stay_whole_and_in_order(drawn: list[tuple[int, int, int]]) -> None:
    placed = [
        # Slot 2 has no portions.
        Placed(slot, Item(sequence(rows), index, 0, 1.0), None if slot == 2 else portion)
        for index, (slot, portion, rows) in enumerate(drawn)
    ]
    one = Placed(0, Item(sequence(1), 99, 0, 1.0), 0)
    found = cut_round(Round(replicas=((tuple(placed), (one,)), ((),))), TABLE)
    mine, other = found.replicas
    assert other == ((),), "each replica has at least one"
    at = {(p.slot, p.item.index): m for m, items in enumerate(mine) for p in items}
    assert at.keys() == {(p.slot, p.item.index) for p in (*placed, one)}
    for slot in (0, 1):
        by_portion = [
            {at[p.slot, p.item.index] for p in (*placed, one) if (p.slot, p.portion) == (slot, n)}
            for n in range(3)
        ]
        assert all(len(where) <= 1 for where in by_portion)
        order = list(itertools.chain(*by_portion))
        assert order == sorted(order)


def test_a_packed_micro_batch_names_its_recompute() -> None:
    items = [Placed(0, Item(sequence(20), 0, 0, 1.0))]
    packed = pack(
        items,
        num_tokens=32,
        num_slots=1,
        dropout_keys=(0,),
        cp_rank=0,
        cp_size=1,
        device=torch.device("cpu"),
    )
    assert packed.view.recompute is None
    named = with_recompute(MicroBatch(packed), TABLE)
    assert named.executed.view.recompute == "selective"
    assert named.executed.tokens is packed.tokens
