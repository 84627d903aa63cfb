"""Packs sequences of many jobs into token-budgeted micro-batches.

A *round* is one forward-backward over `num_micro_batches` micro-batches on every data-parallel
rank. A job puts at most the rest of its current global batch into a round, so its optimizer step
always lands before its next forward, whatever the pipeline depth. Room is shared fairly, sequence
by sequence, and another job begins each round; a job with a small batch steps every round, one with
a large batch every few.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tlora_megatron.model.cp_dispatch import CpTeam
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.row_arrays import RowArrays, SentBatch, SentTokens


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A sequence of a job's current global batch."""

    sequence: TokenSequence
    index: int
    """Place of the sequence in its batch."""
    first_token: int
    """Index of its first row among the rows of the whole batch: keys the dropout."""
    weight: float
    """Weight of each target token's loss; 1 / target tokens of the whole batch when training."""
    sent: SentTokens | None = None
    """Values that a client sent with its tokens, in place of targets and weight; None = a job's own
    data. The last token of the sequence then has no meaning."""

    @property
    def length(self) -> int:
        """Rows it takes: every token but the last, which is only predicted."""
        return len(self.sequence.tokens) - 1


def batch_items(sequences: Sequence[TokenSequence]) -> list[Item]:
    """A global batch, weighted so that summed losses are the mean over its target tokens."""
    targets = sum(int(s.is_target.sum()) for s in sequences)
    first_tokens = np.cumsum([0] + [len(s.tokens) - 1 for s in sequences])
    return [Item(s, i, int(first_tokens[i]), 1.0 / targets) for i, s in enumerate(sequences)]


class Placed(NamedTuple):
    """An item in a bin."""

    slot: int
    item: Item
    portion: int | None = None
    """Number of its portion (`packing.portions`) in the round, from 0; None = in no portion."""


MicroBatchItems = tuple[Placed, ...]
"""The items of one micro-batch, in packed order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """The micro-batches of one round over all data-parallel replicas; the same on every rank."""

    replicas: tuple[tuple[MicroBatchItems, ...], ...]
    """The micro-batches of each replica, in the order in which it runs them. Replicas may have
    unlike numbers of them, 0 too; with a pipeline each has at least one, maybe without items."""
    teams: tuple[tuple[CpTeam, ...], ...] | None = None
    """The context-parallel ranks that run each of these; None = all of the replica run all."""

    def of_rank(self, dp_rank: int, cp_rank: int) -> tuple[list[MicroBatchItems], list[CpTeam]]:
        """Returns the micro-batches that one rank runs; their teams are none if all run all."""
        own = self.replicas[dp_rank]
        if self.teams is None:
            return list(own), []
        pairs = [
            (items, team)
            for items, team in zip(own, self.teams[dp_rank], strict=True)
            if team.has(cp_rank)
        ]
        return [items for items, _ in pairs], [team for _, team in pairs]

    @property
    def micro_batches(self) -> Iterator[MicroBatchItems]:
        """All micro-batches, a replica after the other."""
        return itertools.chain.from_iterable(self.replicas)

    @property
    def num_tokens(self) -> int:
        """Tokens of all micro-batches without padding."""
        return sum(placed.item.length for items in self.micro_batches for placed in items)

    @property
    def most_documents(self) -> int:
        """Documents of the micro-batch that holds most of them."""
        return max(map(len, self.micro_batches), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundShape:
    """The driver's demands on the rounds of a super-model; by default there are none."""

    num_micro_batches: Callable[[], int] | None = None
    """Gives the number on every data-parallel rank, and is asked at every round, since a trainer
    may ramp its batch size up; None = as many as the work needs."""
    fills_budget: bool = False
    """Every micro-batch has as many rows as the token budget; else as the fullest of its round."""
    exactness: Exactness | None = None
    """For every micro-batch, those of evaluations too."""
    recompute: RecomputeTable | None = None
    """Chooses the recompute of each micro-batch in training, and where rounds are cut into
    micro-batches (`packing.recompute_cut`); None = all have that of their layers."""

    def asked_micro_batches(self) -> int | None:
        """The number that the driver wants in the next round; None = any."""
        return None if self.num_micro_batches is None else self.num_micro_batches()


def choose_num_micro_batches(total_tokens: int, capacity: int, dp_size: int, pp_size: int) -> int:
    """Micro-batches a round: 1 without a pipeline; with one, enough to fill it, at most 4 a stage.

    Short rounds let every job step as soon as its batch is done; 4 a stage keeps the 1F1B bubble
    under `(pp - 1) / (5 pp - 1)`, a fifth.
    """
    if pp_size == 1:
        return 1
    needed = math.ceil(total_tokens / (capacity * dp_size))
    return min(max(needed, pp_size), 4 * pp_size)


def fill_bins(
    queues: Sequence[list[Item]],
    *,
    capacity: int,
    dp_size: int,
    pp_size: int,
    first_slot: int = 0,
    num_micro_batches: int | None = None,
) -> tuple[Round, list[list[Item]]]:
    """Takes items from every slot's queue in turn until nothing more fits.

    Args:
        queues: what is left of each slot's batch; empty for a slot that waits.
        capacity: tokens a micro-batch may hold.
        first_slot: has the first turn, modulo the number of slots. Where one sequence fills a
            micro-batch, it is the only slot that gets any room, so callers go round.
        num_micro_batches: on every data-parallel rank; None = `choose_num_micro_batches`.

    Returns:
        The round, and what is left of each queue.
    """
    if num_micro_batches is None:
        total = sum(item.length for queue in queues for item in queue)
        num_micro_batches = choose_num_micro_batches(total, capacity, dp_size, pp_size)
    # Longest first: what fits only into an empty bin goes while there is one.
    left = [sorted(queue, key=lambda item: -item.length) for queue in queues]
    turns = [(first_slot + turn) % len(left) for turn in range(len(left))]
    contents = _deal(left, turns, num_bins=num_micro_batches * dp_size, capacity=capacity)
    return Round(replicas=tuple(contents[d::dp_size] for d in range(dp_size))), left


def _deal(
    left: Sequence[list[Item]], turns: Sequence[int], *, num_bins: int, capacity: int
) -> tuple[tuple[Placed, ...], ...]:
    """Moves items from the slots' queues to the lightest micro-batch, a slot after the other.

    Args:
        left: each slot's queue, in the order to take from; what fits is removed.
        turns: the slots in the order of their turns.
    """
    loads = [0] * num_bins
    contents: list[list[Placed]] = [[] for _ in loads]
    open_slots = [slot for slot in turns if left[slot]]
    while open_slots:
        for slot in list(open_slots):
            item = left[slot][0]
            lightest = min(range(num_bins), key=loads.__getitem__)
            if loads[lightest] + item.length > capacity:
                open_slots.remove(slot)
                continue
            contents[lightest].append(Placed(slot, left[slot].pop(0)))
            loads[lightest] += item.length
            if not left[slot]:
                open_slots.remove(slot)
    return tuple(in_packed_order(content) for content in contents)


def in_packed_order(content: Sequence[Placed]) -> tuple[Placed, ...]:
    """Sorts a bin's items by slot, a slot's by portion, and these by their place in its batch."""
    return tuple(sorted(content, key=lambda p: (p.slot, p.portion or 0, p.item.index)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """Token tensors and routing of one micro-batch on one rank."""

    view: MicroBatchView
    tokens: torch.Tensor
    """int64 `[1, T]`."""
    labels: torch.Tensor
    """int64 `[1, T]`; 0 where nothing is predicted."""
    weights: torch.Tensor
    """fp32 `[T]`; 0 where nothing is predicted."""
    target_rows: torch.Tensor
    """int64 `[n]`, ascending: rows where something is predicted."""
    order: torch.Tensor | None = None
    """Row of the view that each row of the tensors is, int64 `[T]`; None = the same row."""
    sent: SentBatch | None = None
    """Values that clients sent with their rows; None = no row is a client's."""

    def positions(self, device: torch.device) -> torch.Tensor:
        """Position of every row's token in its own document, int64 `[1, T]`."""
        positions_T = self.view.positions(device)
        return (positions_T if self.order is None else positions_T[self.order]).unsqueeze(0)


class SplitBatch(NamedTuple):
    """A micro-batch's items in nano-batches, each padded on its own."""

    batch: PackedBatch
    """Rows of the nano-batches in the order of `parallel.nano_cuts`."""
    places: torch.Tensor
    """Row of `batch` for every row of the items in packed order, int64."""


class MicroBatch(NamedTuple):
    """A micro-batch as its items were packed, and as an engine executes it."""

    packed: PackedBatch
    """Items one behind the other, then padding."""
    split: SplitBatch | None = None
    """The same items in nano-batches; None = the micro-batch runs whole."""

    @property
    def executed(self) -> PackedBatch:
        """The batch that an engine runs through the model."""
        return self.packed if self.split is None else self.split.batch

    def restore_order(self, values_T: torch.Tensor) -> torch.Tensor:
        """Reorders values of the executed rows into packed order; padding gets 0."""
        if self.split is None:
            return values_T
        ordered_T = values_T.new_zeros(self.packed.view.num_tokens)
        places = self.split.places
        ordered_T[: len(places)] = values_T[places]
        return ordered_T


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple that is at least `value`."""
    return -(-value // multiple) * multiple


def pack(
    placed: Sequence[Placed],
    *,
    num_tokens: int,
    num_slots: int,
    dropout_keys: Sequence[int],
    cp_rank: int,
    cp_size: int,
    device: torch.device,
    token_budget: int | None = None,
    num_parts: int = 1,
    exactness: Exactness | None = None,
) -> PackedBatch:
    """Builds one rank's micro-batch of `num_tokens` rows (over all CP ranks) from placed items.

    Args:
        token_budget, num_parts, exactness: see `pack_micro_batch`.
    """
    view = pack_micro_batch(
        documents_of(placed),
        num_slots=num_slots,
        num_tokens=num_tokens,
        dropout_keys=dropout_keys,
        cp_rank=cp_rank,
        cp_size=cp_size,
        token_budget=token_budget,
        num_parts=num_parts,
        exactness=exactness,
    )
    return on_device(view, fill_rows(placed, num_tokens), view.local_rows(), device)


def documents_of(placed: Sequence[Placed]) -> list[Document]:
    """The slots and lengths that routing is made from."""
    return [
        Document(
            slot=p.slot,
            length=p.item.length,
            first_token=p.item.first_token,
            portion=p.portion or 0,
        )
        for p in placed
    ]


def on_device(
    view: MicroBatchView, arrays: RowArrays, rows: torch.Tensor, device: torch.device
) -> PackedBatch:
    """Copies the chosen rows of the arrays to the device as a micro-batch."""
    tokens_T, labels_T, weights_T = (
        torch.from_numpy(values)[rows] for values in (arrays.tokens, arrays.labels, arrays.weights)
    )
    is_target_T = weights_T != 0
    sent = None
    if arrays.sent is not None:
        is_target_T |= torch.from_numpy(arrays.sent.is_sent)[rows]
        sent = arrays.sent.on_device(rows, device)
    return PackedBatch(
        view=view,
        tokens=to_device(tokens_T, device).unsqueeze(0),
        labels=to_device(labels_T, device).unsqueeze(0),
        weights=to_device(weights_T, device),
        # Found here: on the device, finding them would wait for it.
        target_rows=to_device(is_target_T.nonzero().flatten(), device),
        sent=sent,
    )


def fill_rows(placed: Sequence[Placed], num_tokens: int) -> RowArrays:
    """Tokens, labels and loss weights `[num_tokens]` in packed order, zeros behind the items."""
    rows = RowArrays.zeros(num_tokens, sent=any(p.item.sent is not None for p in placed))
    begin = 0
    for item in (p.item for p in placed):
        end = begin + item.length
        rows.tokens[begin:end] = item.sequence.tokens[:-1]
        if item.sent is None:
            target = item.sequence.is_target[1:]
            rows.labels[begin:end] = np.where(target, item.sequence.tokens[1:], 0)
            rows.weights[begin:end] = np.where(target, item.weight, 0.0)
        else:
            rows.put_sent(begin, end, item.sent)
        begin = end
    return rows
