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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.model.cp_dispatch import CpTeam
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen.losses import KINDS, TokenInputs, scaled_losses
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch
from tlora_megatron.training.data.tokenize import TokenSequence


class SentTokens(NamedTuple):
    """Values that a client sent with the tokens of one sequence, one for every row."""

    targets: np.ndarray
    """The token that each row is to predict; any."""
    weights: np.ndarray
    """fp32, of the rows' cross entropy; where this is 0 there is a log-probability all the same."""
    kind: int = KINDS["cross_entropy"]
    """Number of the loss (`ops.frozen.losses`)."""
    inputs: np.ndarray | None = None
    """fp32 `[4, T]`, the further fields of `TokenInputs`; None for cross entropy."""


class SentBatch(NamedTuple):
    """Values that clients sent with rows of a micro-batch, on the device."""

    is_sent: Tensor
    """bool `[T]`: the row is a client's."""
    kinds: frozenset[int]
    """Numbers of the losses that its rows have."""
    inputs: TokenInputs | None
    """None if cross entropy is the only loss."""

    def losses(self, nll_T: Tensor, weights_T: Tensor) -> tuple[Tensor, Tensor]:
        """Returns losses to differentiate, and values to report: `-log p` of clients' rows.

        Rows of other jobs have the bits of `nll_T * weights_T` in both.
        """
        losses_T = scaled_losses(nll_T, weights_T, self.inputs, self.kinds)
        return losses_T, torch.where(self.is_sent, nll_T, losses_T).detach()


class RowArrays(NamedTuple):
    """Rows of a micro-batch on the host, and what clients sent with them."""

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    is_sent: np.ndarray
    """bool `[T]`: the row is a client's."""
    kind: np.ndarray
    """int8 `[T]`: number of its loss."""
    inputs: np.ndarray
    """fp32 `[4, T]`."""

    @classmethod
    def zeros(cls, num_tokens: int) -> RowArrays:
        """Rows that are padding."""
        return cls(
            tokens=np.zeros(num_tokens, dtype=np.int64),
            labels=np.zeros(num_tokens, dtype=np.int64),
            weights=np.zeros(num_tokens, dtype=np.float32),
            is_sent=np.zeros(num_tokens, dtype=np.bool_),
            kind=np.zeros(num_tokens, dtype=np.int8),
            inputs=np.zeros((4, num_tokens), dtype=np.float32),
        )

    @classmethod
    def join(cls, parts: Sequence[RowArrays]) -> RowArrays:
        return cls(*(np.concatenate(values, axis=-1) for values in zip(*parts, strict=True)))

    def sent_on_device(self, rows: Tensor, device: torch.device) -> SentBatch | None:
        """Copies what clients sent with the chosen rows; None if no row at all is a client's."""
        if not self.is_sent.any():
            return None
        is_sent_T = to_device(torch.from_numpy(self.is_sent)[rows], device)
        kinds = frozenset(np.unique(self.kind).tolist())
        if kinds <= {KINDS["cross_entropy"]}:
            return SentBatch(is_sent_T, kinds, None)
        kind_T = to_device(torch.from_numpy(self.kind)[rows], device)
        values_4T = to_device(torch.from_numpy(self.inputs)[:, rows], device)
        return SentBatch(is_sent_T, kinds, TokenInputs(kind_T, *values_4T))


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
    """Values that clients sent with their rows; None = no row is a client's."""

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
    for item in (p.item for p in placed):
        end = begin + item.length
        rows.tokens[begin:end] = item.sequence.tokens[:-1]
        if item.sent is None:
            target = item.sequence.is_target[1:]
            rows.labels[begin:end] = np.where(target, item.sequence.tokens[1:], 0)
            rows.weights[begin:end] = np.where(target, item.weight, 0.0)
        else:
            rows.labels[begin:end], rows.weights[begin:end] = item.sent.targets, item.sent.weights
            rows.is_sent[begin:end], rows.kind[begin:end] = True, item.sent.kind
            if item.sent.inputs is not None:
                rows.inputs[:, begin:end] = item.sent.inputs
        begin = end
    return rows
