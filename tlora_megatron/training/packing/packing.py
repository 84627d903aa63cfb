"""Packs sequences of many jobs into token-budgeted micro-batches.

A *round* is one forward-backward over `num_micro_batches` micro-batches on every data-parallel
rank. A job puts at most the rest of its current global batch into a round, so its optimizer step
always lands before its next forward, whatever the pipeline depth. Room is shared fairly, sequence
by sequence, and another job begins each round; a job with a small batch steps every round, one with
a large batch every few.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.model.cp_dispatch import CpTeam
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen.losses import row_weights
from tlora_megatron.ops.frozen.pair_losses import PairRows, PairTerms
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.row_arrays import RowArrays, SentBatch, SentTokens


class Rejected(NamedTuple):
    """The other side of a pair, whose chosen one is the item's sequence."""

    sequence: TokenSequence
    terms: PairTerms[float]
    """Numbers of the pair's loss."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A sequence of a job's current global batch, or a pair of them."""

    sequence: TokenSequence
    index: int
    """Place of the item in its batch."""
    first_token: int
    """Index of its first row among the rows of the whole batch: keys the dropout."""
    weight: float
    """Weight of each target token's loss; 1 / target tokens of the whole batch when training."""
    sent: SentTokens | None = None
    """Values that a client sent with its tokens, in place of targets and weight; None = a job's own
    data. The last token of the sequence then has no meaning."""
    rejected: Rejected | None = None
    """None = it is no pair."""

    @property
    def sides(self) -> tuple[TokenSequence, ...]:
        """The sequences that it runs as: documents side by side."""
        return (
            (self.sequence,) if self.rejected is None else (self.sequence, self.rejected.sequence)
        )

    @property
    def length(self) -> int:
        """Rows it takes: every token of a side but the last, which is only predicted."""
        rows = len(self.sequence.tokens) - 1
        return rows if self.rejected is None else rows + len(self.rejected.sequence.tokens) - 1


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
        held = (sum(len(p.item.sides) for p in items) for items in self.micro_batches)
        return max(held, default=0)


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
    micro-batches (`packing.portions`); None = all have that of their layers."""

    def asked_micro_batches(self) -> int | None:
        """The number that the driver wants in the next round; None = any."""
        return None if self.num_micro_batches is None else self.num_micro_batches()


def in_packed_order(content: Sequence[Placed]) -> tuple[Placed, ...]:
    """Sorts a bin's items by slot, a slot's by portion, and these by their place in its batch."""
    return tuple(sorted(content, key=lambda p: (p.slot, p.portion or 0, p.item.index)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """Token tensors and routing of one micro-batch on one rank."""

    view: MicroBatchView
    tokens: Tensor
    """int64 `[1, T]`."""
    labels: Tensor
    """int64 `[1, T]`; 0 where nothing is predicted."""
    weights: Tensor
    """fp32 `[T]`; 0 where nothing is predicted."""
    target_rows: Tensor
    """int64 `[n]`, ascending: rows where something is predicted."""
    order: Tensor | None = None
    """Row of the view that each row of the tensors is, int64 `[T]`; None = the same row."""
    sent: SentBatch | None = None
    """Rows that report `-log p`, and what clients sent with theirs; None = there are none."""
    pairs: PairRows | None = None
    """Rows of pairs; None = there are none."""

    def losses(
        self, nll_T: Tensor, add: Callable[[Tensor], object] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns losses `[T]` to differentiate, and values to report.

        These are `-log p` of the rows of clients and of pairs, whose losses depend on more.

        Args:
            add: sums over the ranks that share the micro-batch; None = this one has all rows.
        """
        weights_T, told_T = self.weights, nll_T.detach()
        if self.sent is not None:
            weights_T = row_weights(told_T, weights_T, self.sent.inputs, self.sent.kinds)
        if self.pairs is not None:
            exact = self.view.exactness is not None
            weights_T = self.pairs.weights(told_T, weights_T, add, exact)
        losses_T = nll_T * weights_T
        if self.sent is None:
            return losses_T, losses_T.detach()
        return losses_T, torch.where(self.sent.is_sent, told_T, losses_T.detach())

    def positions(self, device: torch.device) -> Tensor:
        """Position of every row's token in its own document, int64 `[1, T]`."""
        positions_T = self.view.positions(device)
        return (positions_T if self.order is None else positions_T[self.order]).unsqueeze(0)


class SplitBatch(NamedTuple):
    """A micro-batch's items in nano-batches, each padded on its own."""

    batch: PackedBatch
    """Rows of the nano-batches in the order of `parallel.nano_cuts`."""
    places: Tensor
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

    def restore_order(self, values_T: Tensor) -> Tensor:
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
    """Builds one rank's micro-batch of `num_tokens` rows (over all CP ranks) from placed items."""
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
    rows = view.local_rows()
    batch = on_device(view, fill_rows(placed, num_tokens), rows, device)
    places = torch.full((num_tokens,), -1)
    places[rows] = torch.arange(len(rows))
    return replace(batch, pairs=pair_rows(placed, places, device))


def documents_of(placed: Sequence[Placed]) -> list[Document]:
    """The slots and lengths that routing is made from."""
    documents = []
    for slot, item, portion in placed:
        begin = item.first_token
        for side in item.sides:
            rows = len(side.tokens) - 1
            documents.append(
                Document(slot=slot, length=rows, first_token=begin, portion=portion or 0)
            )
            begin += rows
    return documents


def pair_rows(placed: Sequence[Placed], places: Tensor, device: torch.device) -> PairRows | None:
    """Finds the rows of pairs; None if there are none.

    Args:
        places: row of the tensors for every row of the items in packed order, int64; -1 = another
            rank has it.
    """
    if not any(p.item.rejected is not None for p in placed):
        return None
    begin, found = 0, list[Tensor]()
    for item in (p.item for p in placed):
        for side in item.sides:
            targets = torch.from_numpy(np.flatnonzero(side.is_target[1:]) + begin)
            begin += len(side.tokens) - 1
            if item.rejected is not None:
                found.append(places[targets][places[targets] >= 0])
    return PairRows(
        rows_R=to_device(torch.cat(found), device),
        lengths_G=to_device(torch.tensor([len(part) for part in found]), device),
        terms_KP=to_device(terms_of([p.item for p in placed]), device),
    )


def terms_of(items: Sequence[Item]) -> Tensor:
    """Numbers of the losses of those items that are pairs, fp64 `[K, P]`."""
    terms = [item.rejected.terms for item in items if item.rejected is not None]
    return torch.tensor(terms, dtype=torch.float64).t().contiguous()


def on_device(
    view: MicroBatchView, arrays: RowArrays, rows: Tensor, device: torch.device
) -> PackedBatch:
    """Copies the chosen rows of the arrays to the device as a micro-batch."""
    tokens_T, labels_T, weights_T = (
        torch.from_numpy(values)[rows] for values in (arrays.tokens, arrays.labels, arrays.weights)
    )
    is_target_T = (weights_T != 0) | torch.from_numpy(arrays.is_sent)[rows]
    return PackedBatch(
        view=view,
        tokens=to_device(tokens_T, device).unsqueeze(0),
        labels=to_device(labels_T, device).unsqueeze(0),
        weights=to_device(weights_T, device),
        # Found here: on the device, finding them would wait for it.
        target_rows=to_device(is_target_T.nonzero().flatten(), device),
        sent=arrays.sent_on_device(rows, device),
    )


def fill_rows(placed: Sequence[Placed], num_tokens: int) -> RowArrays:
    """Tokens, labels and loss weights `[num_tokens]` in packed order, zeros behind the items."""
    rows = RowArrays.zeros(num_tokens)
    begin = 0
    for item, sequence in ((p.item, side) for p in placed for side in p.item.sides):
        end = begin + len(sequence.tokens) - 1
        rows.tokens[begin:end] = sequence.tokens[:-1]
        if item.sent is None:
            target = sequence.is_target[1:]
            rows.labels[begin:end] = np.where(target, sequence.tokens[1:], 0)
            rows.weights[begin:end] = np.where(target, item.weight, 0.0)
            rows.is_sent[begin:end] = target & (item.rejected is not None)
        else:
            rows.labels[begin:end], rows.weights[begin:end] = item.sent.targets, item.sent.weights
            rows.is_sent[begin:end], rows.kind[begin:end] = True, item.sent.kind
            if item.sent.inputs is not None:
                rows.inputs[:, begin:end] = item.sent.inputs
        begin = end
    return rows
