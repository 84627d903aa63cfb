"""Cutting micro-batches into nano-batches: nothing lost, in order, padded alike."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.routing import Document, join_nano_batches, pack_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano_cuts import (
    cut_by_length,
    cut_to_fit,
    fill_parts,
    padded_rows,
    shard_order,
)
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing import round_packer
from tlora_megatron.training.packing.packing import (
    Item,
    MicroBatch,
    PackedBatch,
    Placed,
    RoundShape,
    SplitBatch,
    pack,
)
from tlora_megatron.training.packing.round_packer import RoundPacker

CPU = torch.device("cpu")
LENGTHS = (5, 9, 3, 30, 1, 12, 7)
SLOTS = (0, 0, 0, 1, 3, 3, 3)


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[Document]:
    return [Document(slot=s, length=n) for s, n in zip(SLOTS, lengths, strict=False)]


def placed_items(lengths: tuple[int, ...] = LENGTHS) -> list[Placed]:
    """Items with tokens that tell them apart; the first one of a slot has no targets."""
    items, first_token = [], 0
    for index, (slot, length) in enumerate(zip(SLOTS, lengths, strict=False)):
        tokens = np.arange(length + 1) + 100 * (index + 1)
        sequence = TokenSequence(tokens=tokens, is_target=tokens % 3 != 0)
        items.append(Placed(slot, Item(sequence, index, first_token, 1.0 / (index + 1))))
        first_token += length
    return items


def groups(*, cp_rank: int = 0, dp_rank: int = 0, **layout: Any) -> ParallelGroups:
    nobody: Any = None
    return ParallelGroups(
        layout=ParallelLayout(**layout), tp_rank=0, pp_rank=0, cp_rank=cp_rank, dp_rank=dp_rank,
        tp_group=nobody, dp_cp_group=nobody, model_group=nobody, device=CPU,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def rows_in_fours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_packer, "row_multiple", lambda _: 4)


def packer(
    count: int, *, gone: int | None = None, full: bool = False, **layout: Any
) -> RoundPacker:
    return RoundPacker(
        groups=groups(**layout), micro_batch_tokens=80, shape=RoundShape(fills_budget=full),
        active=tuple(slot != gone for slot in range(4)), num_nano_batches=count,
    )  # fmt: skip


def split_of(count: int, **how: Any) -> SplitBatch:
    (packed,) = packer(count, **how).pack([placed_items()])
    assert packed.split is not None
    return packed.split


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_a_cut_keeps_all_documents_in_order(count: int) -> None:
    cuts = cut_by_length(documents(), count)
    assert cuts[0] == 0
    assert cuts[-1] == len(LENGTHS)
    assert list(cuts) == sorted(set(cuts))
    assert len(cuts) - 1 <= count


def test_a_cut_that_padding_does_not_leave_room_for_has_fewer_parts() -> None:
    lengths = (5, 5, 5, 5)
    assert padded_rows(documents(lengths), (0, 1, 4), 4) == (8, 16)
    for most_rows, parts in ((None, 4), (32, 4), (31, 2), (24, 2), (23, 1), (3, 1)):
        cuts = cut_to_fit(documents(lengths), 4, multiple=4, most_rows=most_rows)
        assert len(cuts) - 1 == parts, most_rows


def test_padding_goes_to_the_smallest_part_and_then_into_one_of_its_own() -> None:
    assert fill_parts((8, 16), num_rows=24, multiple=8, most_rows=16) == (8, 16)
    assert fill_parts((8, 16), num_rows=32, multiple=8, most_rows=16) == (16, 16)
    assert fill_parts((8, 16), num_rows=48, multiple=8, most_rows=16) == (16, 16, 16)
    assert fill_parts((), num_rows=8, multiple=8, most_rows=16) == (8,)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_a_shard_is_every_nano_batch_s_shard(num_shards: int) -> None:
    rows = (8, 16, 4)
    order = shard_order(rows, num_shards)
    assert sorted(order.tolist()) == list(range(sum(rows)))
    begins = [0, 8, 24]
    for shard, held in enumerate(order.view(num_shards, -1)):
        runs = [
            range(begin + shard * size // num_shards, begin + (shard + 1) * size // num_shards)
            for begin, size in zip(begins, rows, strict=True)
        ]
        assert held.tolist() == list(itertools.chain(*runs))


def test_a_joined_micro_batch_has_the_rows_of_its_nano_batches() -> None:
    views = [
        pack_micro_batch(part, num_slots=4, num_tokens=size)
        for part, size in ((documents()[:3], 20), (documents()[3:], 52))
    ]
    joined = join_nano_batches(views)
    assert joined.num_tokens == 72
    assert joined.nano_views == tuple(views)
    expected = torch.cat([view.positions(CPU) for view in views])
    assert torch.equal(joined.positions(CPU), expected)
    with pytest.raises(AssertionError, match="no single run"):
        _ = joined.rows


def packed_whole() -> PackedBatch:
    return pack(
        placed_items(), num_tokens=80, num_slots=4, dropout_keys=(), cp_rank=0, cp_size=1,
        device=CPU,
    )  # fmt: skip


@pytest.mark.parametrize("layout", [{}, {"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_split_has_the_same_tokens_and_targets(count: int, layout: dict[str, Any]) -> None:
    whole = packed_whole()
    batch, places = split_of(count, **layout)
    used = sum(LENGTHS)
    assert len(batch.view.nano_views) in range(2, count + 1)
    assert all(view.num_tokens % 4 == 0 for view in batch.view.nano_views)
    for name in ("tokens", "labels", "weights"):
        ours, plain = (getattr(b, name).flatten() for b in (batch, whole))
        assert torch.equal(ours[places], plain[:used]), name
        assert ours.count_nonzero() == plain.count_nonzero(), name
    positions = batch.positions(CPU)[0]
    assert torch.equal(positions[places], whole.positions(CPU)[0, :used])
    assert batch.weights[batch.target_rows].all()
    assert len(batch.target_rows) == len(whole.target_rows)


def test_values_of_the_rows_that_ran_come_back_in_order() -> None:
    whole = packed_whole()
    split = split_of(3, tp_size=2, sequence_parallel=True)
    in_parts = MicroBatch(whole, split)
    assert in_parts.executed is split.batch
    assert torch.equal(in_parts.restore_order(split.batch.weights), whole.weights)
    assert MicroBatch(whole).executed is whole
    assert torch.equal(MicroBatch(whole).restore_order(whole.weights), whole.weights)


def test_jobs_that_are_gone_move_no_cut_of_the_others() -> None:
    whole = split_of(3)
    gone = split_of(3, gone=1)

    def parts(split: SplitBatch) -> list[set[tuple[int, int]]]:
        found = []
        for view in split.batch.view.nano_views:
            documents = [d for d in view.documents if d.slot not in (1, 4)]
            found.append({(d.slot, d.first_token) for d in documents})
        return [part for part in found if part]

    assert parts(gone) == parts(whole)


def test_all_micro_batches_of_a_round_have_equally_many_rows() -> None:
    items = placed_items()
    packed = packer(2, pp_size=2).pack([items[:4], items[4:], []])
    assert {p.executed.view.num_tokens for p in packed} == {52}
    assert [len(p.executed.view.nano_views) for p in packed] == [2, 2, 1]


def test_micro_batches_of_one_sequence_run_whole() -> None:
    items = placed_items()
    assert [p.split for p in packer(4).pack([items[:1], items[1:2]])] == [None, None]


def test_a_fixed_number_of_rows_is_kept() -> None:
    assert split_of(3, full=True).batch.view.num_tokens == 80


def test_a_portion_is_in_one_nano_batch_as_a_whole() -> None:
    portions = (0, 0, 1, 0, 0, 0, 1)
    fair_items = placed_items((8,) * 7)
    placed = [p._replace(portion=n) for p, n in zip(fair_items, portions, strict=True)]
    split, fair = packer(7).pack([placed, fair_items])
    views = split.executed.view.nano_views
    held = [{(d.slot, d.portion) for d in view.documents if d.slot < 4} for view in views]
    assert sorted(p for of_one in held for p in of_one) == [(0, 0), (0, 1), (1, 0), (3, 0), (3, 1)]
    assert 1 < len(views) <= 5 < len(fair.executed.view.nano_views)


@pytest.mark.parametrize(("lengths", "parts"), [((30, 30), 2), ((60, 4), 1), ((64,), 1)])
def test_kernels_are_cut_for_the_number_asked_for(lengths: tuple[int, ...], parts: int) -> None:
    """Alone a job's documents may not be cut: its bits must not depend on that."""
    rows = RoundPacker(
        groups=groups(), micro_batch_tokens=64, shape=RoundShape(), active=(True,) * 4,
        num_nano_batches=2,
    )  # fmt: skip
    (batch,) = rows.pack([placed_items(lengths)])
    views = batch.executed.view.nano_views or (batch.executed.view,)
    assert len(views) == parts
    assert {view.rows.row_budget for view in views} == {32}
