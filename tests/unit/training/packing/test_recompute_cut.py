"""Rounds cut by time, by recompute and among teams of ranks: budgets kept, nothing lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.training.packing.test_nano_batch import groups
from tests.unit.training.packing.test_packing import sequence
from tlora_megatron.model.cp_dispatch import CpRates, CpTeam
from tlora_megatron.model.dispatch import ReplicaRate
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.training.packing.packing import (
    Item,
    Placed,
    Round,
    RoundShape,
)
from tlora_megatron.training.packing.portions import (
    RoundRule,
    cut_by_recompute,
    cut_round,
    fill_by_time,
    rank_ends_ps,
    round_ends_ps,
)
from tlora_megatron.training.packing.round_packer import PackedRound, RoundPacker

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


RATE = ReplicaRate(token_ps=1000, square_ps=100, fixed_ps=5, longest=40)
QUEUES = st.lists(st.lists(st.integers(1, 40), max_size=9), min_size=1, max_size=5)
SHAPES = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 3))


def items(lengths: Sequence[int]) -> list[Item]:
    return [Item(sequence(n, targets=n + 1), i, 0, 1.0) for i, n in enumerate(lengths)]


def rule_of(dp_size: int, depth: int, pp_size: int = 1) -> RoundRule:
    return RoundRule(rates=(RATE,) * dp_size, depth=depth, stages=(pp_size,) * dp_size)


@given(QUEUES, SHAPES)
@fast
def test_every_sequence_runs_once_within_the_budget(
    lengths: list[list[int]], shape: tuple[int, int, int]
) -> None:
    dp_size, depth, pp_size = shape
    left, placed, number = [items(queue) for queue in lengths], [], 0
    while any(left):
        filled, left = fill_by_time(left, rule_of(dp_size, depth, pp_size), first_slot=number)
        assert len(filled.replicas) == dp_size
        for replica in filled.replicas:
            used = [sum(p.item.length for p in own) for own in replica]
            assert max(used, default=0) <= RATE.longest
            assert used == sorted(used, reverse=True)
            assert len(replica) >= (pp_size > 1)
            assert pp_size == 1 or not any(used) or len(replica) >= pp_size
            assert pp_size > 1 or all(used)
        for own in filled.micro_batches:
            order = [(p.slot, p.item.index) for p in own]
            assert order == sorted(order)
        held = [(p.slot, p.item.index) for own in filled.micro_batches for p in own]
        assert held, "a round must place something"
        placed += held
        number += 1
    assert sorted(placed) == [(s, i) for s, queue in enumerate(lengths) for i in range(len(queue))]


def test_the_order_of_a_queue_does_not_matter() -> None:
    draw = random.Random(0)
    queue = items(draw.sample(range(1, 41), 30))
    shuffled = draw.sample(queue, len(queue))
    one, other = (fill_by_time([q], rule_of(3, 2))[0] for q in (queue, shuffled))
    assert one == other


def test_a_long_sequence_is_alone_while_others_share_out_the_rest() -> None:
    filled, _ = fill_by_time([items([40] + [10] * 8)], rule_of(2, 2))
    ends = round_ends_ps(filled, [RATE] * 2)
    assert [[p.item.length for p in own] for own in filled.replicas[0]] == [[40]]
    assert [len(own) for own in filled.replicas[1]] == [4, 4]
    assert ends == [40 * 1000 + 1600 * 100 + 5, 80 * 1000 + 800 * 100 + 10]


def test_replicas_without_sequences_have_no_micro_batch_but_in_a_pipeline() -> None:
    for pp_size, count in ((1, 0), (2, 1)):
        filled, _ = fill_by_time([items([7])], rule_of(2, 2, pp_size))
        assert len(filled.replicas[1]) == count


def packer(pp_size: int = 1, **changes: Any) -> RoundPacker:
    made = RoundPacker(
        groups=groups(dp_rank=1, dp_size=2, pp_size=pp_size), micro_batch_tokens=40,
        shape=RoundShape(), active=(True,), dropout_keys=(1,), rule=rule_of(2, 2, pp_size),
    )  # fmt: skip
    return replace(made, **changes)


@pytest.mark.parametrize(("pp_size", "rows"), [(1, [48, 32]), (2, [48, 48])])
def test_micro_batches_have_their_own_rows_but_in_a_pipeline(pp_size: int, rows: list[int]) -> None:
    queue = items([40, 33, 30])
    packed = packer(pp_size).pack_part([queue], first_slot=0)
    assert [m.packed.view.num_tokens for m in packed.micro_batches] == rows
    held = [[p.item.length for p in own] for own in packed.round.replicas[1]]
    assert held == [[33], [30]]


def test_evaluations_stay_balanced_by_tokens() -> None:
    packed = packer(dropout_keys=()).pack_part([items([40, 33, 30])], first_slot=0)
    assert [len(replica) for replica in packed.round.replicas] == [1, 1]


def test_portions_stay_whole_in_deeper_rounds() -> None:
    queue = items([20, 20, 20, 20])
    for depth, count in ((1, 1), (2, 1), (4, 1)):
        made = packer(portion_tokens=(20,), rule=rule_of(2, depth))
        filled = made.fill_round([queue], first_slot=0).round
        assert [len(replica) for replica in filled.replicas] == [count, count]
    made = packer(portion_tokens=(40,))
    filled = made.fill_round([items([40] * 6)], first_slot=0)
    assert [[len(own) for own in replica] for replica in filled.round.replicas] == [[1, 1]] * 2
    assert [item.length for item in filled.left[0]] == [40, 40]


BUDGET = 256
RATES = CpRates(
    (
        ReplicaRate(token_ps=200, square_ps=2, fixed_ps=5, longest=BUDGET // 2),
        ReplicaRate(token_ps=120, square_ps=1, fixed_ps=10, longest=BUDGET),
    )
)
LENGTHS = (150, 20, 20, 20, 20)
ITEMS = items(LENGTHS)


def packed_on(cp_rank: int, table: RecomputeTable | None = None) -> PackedRound:
    packer = RoundPacker(
        groups=groups(cp_rank=cp_rank, cp_size=2), micro_batch_tokens=BUDGET,
        shape=RoundShape(recompute=table), active=(True,), dropout_keys=(1,), cp_rates=RATES,
    )  # fmt: skip
    return packer.pack_part([ITEMS], first_slot=0)


def test_ranks_share_the_long_sequence_and_have_short_ones_of_their_own() -> None:
    """Each row is on one rank, in views that name their ranks and kernels' rows of a whole rank."""
    rounds = [packed_on(rank) for rank in range(2)]
    assert rounds[0].round == rounds[1].round
    assert rounds[0].round.teams == ((CpTeam(0, 2), CpTeam(0, 1), CpTeam(1, 1)),)
    assert rounds[0].round.num_tokens == sum(LENGTHS)
    for rank, packed in enumerate(rounds):
        views = [m.packed.view for m in packed.micro_batches]
        assert [(v.cp_rank, v.cp_size, v.num_tokens) for v in views] == [(rank, 2, 80), (0, 1, 48)]
        assert {v.row_budget for v in views} == {BUDGET // 2}
    targets = sum(len(m.packed.target_rows) for r in rounds for m in r.micro_batches)
    assert targets == sum(LENGTHS)
    assert (
        rank_ends_ps(rounds[0].round, RATES)
        == [10 + RATES.of(2).sequence_ps(150) + 5 + 2 * RATES.of(1).sequence_ps(20)] * 2
    )


def test_recompute_goes_by_the_rows_of_a_rank() -> None:
    table = RecomputeTable((("none", 60), ("full", BUDGET)))
    packed = packed_on(0, table)
    found = [(m.packed.view.num_tokens, m.packed.view.recompute) for m in packed.micro_batches]
    assert found == [(80, "full"), (32, "full"), (32, "full")]
    lighter = packed_on(0, RecomputeTable((("none", 64), ("full", BUDGET))))
    assert [m.packed.view.recompute for m in lighter.micro_batches] == ["full", "none", "none"]
