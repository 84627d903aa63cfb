"""Rounds by time: budgets kept, nothing lost, unlike numbers of micro-batches, own rows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano_cuts import cut_by_length
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.packing import Item, RoundShape
from tlora_megatron.training.packing.portions import RoundRule, fill_by_time, round_ends_ps
from tlora_megatron.training.packing.round_packer import RoundPacker

RATE = ReplicaRate(token_ps=1000, square_ps=100, fixed_ps=5, longest=40)
QUEUES = st.lists(st.lists(st.integers(1, 40), max_size=9), min_size=1, max_size=5)
SHAPES = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 3))
fast = settings(max_examples=60, deadline=None)


def items(lengths: list[int]) -> list[Item]:
    sequences = [TokenSequence(np.zeros(n + 1, np.int32), np.ones(n + 1, bool)) for n in lengths]
    return [Item(sequence, i, 0, 1.0) for i, sequence in enumerate(sequences)]


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
    layout = ParallelLayout(dp_size=2, pp_size=pp_size)
    nobody: Any = None
    groups = ParallelGroups(
        layout=layout, tp_rank=0, pp_rank=0, cp_rank=0, dp_rank=1, tp_group=nobody,
        dp_cp_group=nobody, model_group=nobody, device=torch.device("cpu"),
    )  # fmt: skip
    made = RoundPacker(
        groups=groups,
        micro_batch_tokens=40,
        shape=RoundShape(),
        active=(True,),
        dropout_keys=(1,),
        num_nano_batches=1,
        cut=cut_by_length,
        rule=rule_of(2, 2, pp_size),
    )
    return replace(made, **changes)


@pytest.mark.parametrize(("pp_size", "rows"), [(1, [48, 32]), (2, [48, 48])])
def test_micro_batches_have_their_own_rows_but_in_a_pipeline(pp_size: int, rows: list[int]) -> None:
    queue = items([40, 33, 30])
    packed = packer(pp_size).pack_round([queue], first_slot=0)
    assert [m.packed.view.num_tokens for m in packed.micro_batches] == rows
    held = [[p.item.length for p in own] for own in packed.contents]
    assert held == [[33], [30]]


def test_evaluations_stay_balanced_by_tokens() -> None:
    packed = packer(dropout_keys=()).pack_round([items([40, 33, 30])], first_slot=0)
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
