"""Packs sequences of many jobs into token-budgeted micro-batches.

A *round* is one forward-backward over `num_micro_batches` micro-batches on every data-parallel
rank. A job puts at most the rest of its current global batch into a round, so its optimizer step
always lands before its next forward, whatever the pipeline depth. Room is shared fairly, sequence
by sequence, and another job begins each round; a job with a small batch steps every round, one with
a large batch every few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tlora_megatron.ops.routing.host_copy import to_device
from tlora_megatron.ops.routing.segments import Document, MicroBatchView, pack_micro_batch
from tlora_megatron.training.data.job_data import TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A sequence of a job's current global batch."""

    sequence: TokenSequence
    index: int
    """Of the sequence in its batch."""
    first_token: int
    """Index of its first row among the rows of the whole batch: keys the dropout."""
    weight: float
    """Of each target token's loss; 1 / target tokens of the whole batch when training."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """The micro-batches of one round over all data-parallel ranks."""

    num_micro_batches: int
    dp_size: int
    contents: tuple[tuple[Placed, ...], ...]
    """Bin `m * dp_size + d` is micro-batch m of DP rank d; each in order of slot."""

    @property
    def num_tokens(self) -> int:
        """Of all micro-batches, padding left out."""
        return sum(placed.item.length for content in self.contents for placed in content)

    @property
    def most_documents(self) -> int:
        """Of the micro-batch with most of them."""
        return max(map(len, self.contents))

    def of_rank(self, dp_rank: int) -> list[tuple[Placed, ...]]:
        """Micro-batches of one data-parallel rank."""
        return [self.contents[m * self.dp_size + dp_rank] for m in range(self.num_micro_batches)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundShape:
    """What a super-model's driver fixes of its rounds; by default the work there is decides."""

    num_micro_batches: int | None = None
    """On every data-parallel rank; None = as many as the work asks for."""
    fills_budget: bool = False
    """Every micro-batch has as many rows as the token budget; else as the fullest of its round."""
    portion_tokens: int | None = None
    """Of training rounds: see `training.packing.portions`; None = the room is shared fairly."""


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
) -> tuple[Bins, list[list[Item]]]:
    """Takes items from every slot's queue in turn until nothing more fits.

    Args:
        queues: what is left of each slot's batch; empty for a slot that waits.
        capacity: tokens a micro-batch may hold.
        first_slot: has the first turn, modulo the number of slots. Where one sequence fills a
            micro-batch, it is the only slot that gets any room, so callers go round.
        num_micro_batches: on every data-parallel rank; None = `choose_num_micro_batches`.

    Returns:
        The bins, and what is left of each queue.
    """
    if num_micro_batches is None:
        total = sum(item.length for queue in queues for item in queue)
        num_micro_batches = choose_num_micro_batches(total, capacity, dp_size, pp_size)
    loads = [0] * (num_micro_batches * dp_size)
    contents: list[list[Placed]] = [[] for _ in loads]
    # Longest first: what fits only into an empty bin goes while there is one.
    left = [sorted(queue, key=lambda item: -item.length) for queue in queues]
    turns = [(first_slot + turn) % len(left) for turn in range(len(left))]
    open_slots = [slot for slot in turns if left[slot]]
    while open_slots:
        for slot in list(open_slots):
            item = left[slot][0]
            lightest = min(range(len(loads)), key=loads.__getitem__)
            if loads[lightest] + item.length > capacity:
                open_slots.remove(slot)
                continue
            contents[lightest].append(Placed(slot, left[slot].pop(0)))
            loads[lightest] += item.length
            if not left[slot]:
                open_slots.remove(slot)
    ordered = tuple(tuple(sorted(c, key=lambda p: (p.slot, p.item.index))) for c in contents)
    return Bins(num_micro_batches=num_micro_batches, dp_size=dp_size, contents=ordered), left


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """One micro-batch on one rank: token tensors of the local rows and their routing."""

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
    """Row of the view of each of these rows, int64 `[T]`; None = the same."""
    split: SplitBatch | None = None
    """The same items as they run in nano-batches; None = they run as they are here."""

    @property
    def to_run(self) -> PackedBatch:
        """What goes through the model."""
        return self if self.split is None else self.split.batch

    def in_order(self, values_T: torch.Tensor) -> torch.Tensor:
        """Values of the rows of `to_run` as values of these rows; 0 in padding."""
        if self.split is None:
            return values_T
        ordered_T = values_T.new_zeros(self.view.num_tokens)
        places = self.split.places
        ordered_T[: len(places)] = values_T[places]
        return ordered_T

    def positions(self, device: torch.device) -> torch.Tensor:
        """Position of every row's token in its own document, int64 `[1, T]`."""
        positions_T = self.view.positions(device)
        return (positions_T if self.order is None else positions_T[self.order]).unsqueeze(0)


class SplitBatch(NamedTuple):
    """A micro-batch's items in nano-batches."""

    batch: PackedBatch
    """Rows of nano-batches, each with padding, in the order of `parallel.nano.cuts`."""
    places: torch.Tensor
    """There, the rows of the items in packed order, int64."""


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
) -> PackedBatch:
    """Builds one rank's micro-batch of `num_tokens` rows (over all CP ranks) from placed items.

    Args:
        token_budget, num_parts: as `pack_micro_batch`.
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
    )
    return on_device(view, fill_rows(placed, num_tokens), view.local_rows(), device)


def documents_of(placed: Sequence[Placed]) -> list[Document]:
    """What routing keeps of items."""
    return [
        Document(slot=p.slot, length=p.item.length, first_token=p.item.first_token) for p in placed
    ]


class RowArrays(NamedTuple):
    """What rows hold, on the host."""

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


def on_device(
    view: MicroBatchView, arrays: RowArrays, rows: torch.Tensor, device: torch.device
) -> PackedBatch:
    """The rows `rows` of the arrays as a micro-batch."""
    tokens_T, labels_T, weights_T = (torch.from_numpy(values)[rows] for values in arrays)
    return PackedBatch(
        view=view,
        tokens=to_device(tokens_T, device).unsqueeze(0),
        labels=to_device(labels_T, device).unsqueeze(0),
        weights=to_device(weights_T, device),
        # Found here: on the device, finding them would wait for it.
        target_rows=to_device(weights_T.nonzero().flatten(), device),
    )


def fill_rows(placed: Sequence[Placed], num_tokens: int) -> RowArrays:
    """Tokens, labels and loss weights `[num_tokens]` in packed order, zeros behind the items."""
    tokens = np.zeros(num_tokens, dtype=np.int64)
    labels = np.zeros(num_tokens, dtype=np.int64)
    weights = np.zeros(num_tokens, dtype=np.float32)
    begin = 0
    for _, item in placed:
        end = begin + item.length
        tokens[begin:end] = item.sequence.tokens[:-1]
        target = item.sequence.is_target[1:]
        labels[begin:end] = np.where(target, item.sequence.tokens[1:], 0)
        weights[begin:end] = np.where(target, item.weight, 0.0)
        begin = end
    return RowArrays(tokens, labels, weights)
