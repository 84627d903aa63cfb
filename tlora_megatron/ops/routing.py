"""Routing: which rows of a packed micro-batch belong to which adapter and document.

A `MicroBatchView` is a value that travels with the micro-batch. It is bound around `model(...)` by
`use_micro_batch`, saved by every layer's autograd function for backward, and captured at
activation-checkpoint entry; it is never state on a layer.

Tokens of a micro-batch lie in packed order: documents one after another, those of one adapter side
by side, padding last. Context parallelism deals out the packed order in `2 * cp_size` equal chunks,
rank r holding chunks r and `2 * cp_size - 1 - r`, which balances causal attention over the ranks.
Sequence parallelism then divides a rank's local rows into `tp_size` equal runs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tlora_megatron.config.schema import Recompute
from tlora_megatron.ops.dropout import mix32
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.host_copy import to_device

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One sequence in a packed micro-batch."""

    slot: int
    """Index of its adapter in the bank; the bank's null slot for padding."""
    length: int
    """Tokens."""
    first_token: int = 0
    """Index of its first token among all tokens of its job's global batch: keys the dropout."""
    portion: int = 0
    """Number of its portion, within its slot; documents of one portion are side by side."""


class AttentionSpans(NamedTuple):
    """Causal attention of local query rows, one entry a (chunk, document) pair, in local row order.

    `q_lens[i]` query rows attend to `k_lens[i]` keys that begin at row `k_begins[i]` of the packed
    order, aligned at the bottom right: the last query row sees all of them.
    """

    q_lens: tuple[int, ...]
    k_begins: tuple[int, ...]
    k_lens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Runs of rows, one a slot in ascending order with the null slot last; some are empty.

    Slot i owns rows `ends[i-1]:ends[i]`. It is so on every context-parallel rank: each holds its
    rows in packed order, which is the order of slots.
    """

    ends: tuple[int, ...]
    """`num_slots + 1` of them; the last is the number of rows."""
    token_index: Tensor
    """Index of each row among its job's tokens, int64 `[rows]` on the CPU."""
    dropout_keys: tuple[int, ...]
    row_budget: int
    """The number of rows that sizes of blocks and runs are chosen for: the most that a micro-batch
    of the run may have here, or an even part of them where the run has nano-batches.

    Sizes that decide the order of a sum follow from this, never from the number of rows: otherwise
    a job's bits would depend on what else is packed beside it.
    """
    exactness: Exactness | None = None
    """None = the fastest kernels."""
    cuts: tuple[int, ...] = ()
    """Rows inside a slot's run at which another portion of its job begins, ascending. Sums over
    rows go portion by portion, as if each came in a micro-batch of its own."""
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def num_slots(self) -> int:
        """Slots of adapters: all but the null slot."""
        return len(self.ends) - 1

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each slot."""
        return tuple(end - begin for begin, end in itertools.pairwise((0, *self.ends)))

    @cached_property
    def portions(self) -> tuple[tuple[int, int], ...]:
        """`(slot, rows)` of every portion in row order, of every slot at least one."""
        found, cuts = [], self.cuts
        for slot, (begin, end) in enumerate(itertools.pairwise((0, *self.ends))):
            inside = cuts[bisect_right(cuts, begin) : bisect_left(cuts, end)]
            bounds = itertools.pairwise((begin, *inside, end))
            found += [(slot, last - first) for first, last in bounds]
        return tuple(found)

    @cached_property
    def present_slots(self) -> tuple[int, ...]:
        """Slots with at least one row, null slot left out, ascending."""
        return tuple(slot for slot, n in enumerate(self.lengths[:-1]) if n)

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """Returns the value stored under `key`, building it on first use."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]

    def row_slots(self, device: torch.device) -> Tensor:
        """Slot of each row, int64 `[rows]`."""

        def build() -> Tensor:
            lengths = torch.tensor(self.lengths)
            slots = torch.repeat_interleave(torch.arange(len(self.ends)), lengths)
            return to_device(slots, device)

        return self.cached(("row_slots", device), build)

    def row_keys(self, device: torch.device) -> Tensor:
        """Dropout key of each row before the layer is mixed in, int32 `[rows]`."""

        def build() -> Tensor:
            keys = torch.tensor((*self.dropout_keys, 0))[self.row_slots(torch.device("cpu"))]
            mixed = mix32(keys.to(torch.int32) ^ mix32(self.token_index.to(torch.int32)))
            return to_device(mixed, device)

        return self.cached(("row_keys", device), build)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of local rows inside one document."""

    document: Document
    index: int
    """The document's number in the micro-batch."""
    doc_begin: int
    """Row of the document's first token in packed order."""
    offset: int
    """First row of this piece, counted from the document's begin."""
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchView:
    """The rows of one packed micro-batch that one context-parallel rank holds.

    Every tensor view is built once a device and kept in `cached`.
    """

    documents: tuple[Document, ...]
    num_slots: int
    """Adapter slots in the bank; slot `num_slots` is the null slot (no adapter)."""
    num_tokens: int
    """Rows on this context-parallel rank (all rows without context parallelism)."""
    cp_rank: int
    cp_size: int
    dropout_keys: tuple[int, ...]
    """A 31-bit key a slot, from job seed and step (`ops.dropout`); empty = no dropout."""
    pieces: tuple[_Piece, ...]
    row_budget: int
    """The value for `RowGroups.row_budget`."""
    nano_views: tuple[MicroBatchView, ...] = ()
    """Views of the nano-batches that it runs in, if it does: their rows are this one's in order."""
    exactness: Exactness | None = None
    """Asks all ops for bits that depend on a row's own document and portion; None = on nothing."""
    recompute: Recompute | None = None
    """The part of it that backward computes again; None = as its layers were built to."""
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def under(self, recompute: Recompute) -> MicroBatchView:
        """Returns the same rows, of which backward computes so much again."""
        nanos = tuple(nano.under(recompute) for nano in self.nano_views)
        return replace(self, recompute=recompute, nano_views=nanos)

    def cached(self, key: str, build: Callable[[], T]) -> T:
        """Returns the value stored under `key`, building it on first use."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]

    @property
    def rows(self) -> RowGroups:
        """Adapter groups of all local rows; nano-batches have their own."""
        assert not self.nano_views, "an adapter's rows in several nano-batches are no single run"
        return self.cached("rows", lambda: _group_rows(self))

    @property
    def attention(self) -> AttentionSpans:
        """Query and key ranges of every local span of a document."""

        def build() -> AttentionSpans:
            spans = [(p.length, p.doc_begin, p.offset + p.length) for p in self.pieces]
            return AttentionSpans(*zip(*spans, strict=True))

        return self.cached("attention", build)

    def positions(self, device: torch.device) -> Tensor:
        """Position of every local token in its own document, int64 `[num_tokens]`."""

        def build() -> Tensor:
            runs = [torch.arange(p.offset, p.offset + p.length) for p in self.pieces]
            return to_device(torch.cat(runs), device)

        return self.cached(f"positions@{device}", build)

    def packed_order(self, device: torch.device) -> Tensor | None:
        """Index that puts rows gathered over the context-parallel ranks into packed order.

        int64 `[cp_size * num_tokens]`; None without context parallelism.
        """
        if self.cp_size == 1:
            return None

        def build() -> Tensor:
            chunk = self.num_tokens // 2
            chunks = [c for r in range(self.cp_size) for c in (r, 2 * self.cp_size - 1 - r)]
            held = torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in chunks])
            return to_device(torch.argsort(held), device)

        return self.cached(f"packed_order@{device}", build)

    def local_rows(self) -> Tensor:
        """Packed-order row of every local row, int64 `[num_tokens]` on the CPU."""
        runs = [
            torch.arange(p.doc_begin + p.offset, p.doc_begin + p.offset + p.length)
            for p in self.pieces
        ]
        return torch.cat(runs)


def pack_micro_batch(
    documents: Sequence[Document],
    *,
    num_slots: int,
    num_tokens: int,
    dropout_keys: Sequence[int] = (),
    cp_rank: int = 0,
    cp_size: int = 1,
    token_budget: int | None = None,
    num_parts: int = 1,
    exactness: Exactness | None = None,
) -> MicroBatchView:
    """Lays documents out adapter by adapter, pads to `num_tokens`, and returns one CP rank's view.

    Args:
        documents: in ascending order of slot.
        num_tokens: of the whole micro-batch, padding included; a multiple of `2 * cp_size` under
            context parallelism.
        dropout_keys: one a slot; empty turns dropout off (evaluation).
        token_budget: the most `num_tokens` of the run (`RowGroups.row_budget`); None = these.
        num_parts: the most nano-batches that the run divides a micro-batch into.
        exactness: brings a budget of rows of its own.

    Raises:
        ValueError: if the documents are not in slot order or do not fit.
    """
    budget = num_tokens if token_budget is None else token_budget
    chunks = 1 if cp_size == 1 else 2 * cp_size
    slots, used = [d.slot for d in documents], sum(d.length for d in documents)
    if slots != sorted(slots):
        raise ValueError(f"documents must be in ascending order of slot, got {slots}")
    if used > num_tokens:
        raise ValueError(f"documents must fit into num_tokens={num_tokens}, got {used} tokens")
    if num_tokens > budget:
        raise ValueError(f"num_tokens must be at most token_budget={budget}, got {num_tokens}")
    if num_tokens % chunks:
        raise ValueError(f"num_tokens must be a multiple of {chunks}, got {num_tokens}")
    padding = [Document(slot=num_slots, length=num_tokens - used)] if used < num_tokens else []
    all_documents = (*documents, *padding)
    size = num_tokens // chunks
    held = (0,) if cp_size == 1 else (cp_rank, chunks - 1 - cp_rank)
    pieces = tuple(p for c in held for p in _pieces(all_documents, c * size, (c + 1) * size))
    return MicroBatchView(
        documents=all_documents,
        num_slots=num_slots,
        num_tokens=size * len(held),
        cp_rank=cp_rank,
        cp_size=cp_size,
        dropout_keys=tuple(dropout_keys),
        pieces=pieces,
        row_budget=exactness.row_budget if exactness else -(-budget // (cp_size * num_parts)),
        exactness=exactness,
    )


def join_nano_batches(views: Sequence[MicroBatchView]) -> MicroBatchView:
    """Returns the micro-batch of all nano-batches, one after another, each with its padding."""
    documents = tuple(itertools.chain.from_iterable(view.documents for view in views))
    num_tokens = sum(view.num_tokens for view in views)
    return replace(
        views[0],
        documents=documents,
        num_tokens=num_tokens,
        pieces=tuple(_pieces(documents, 0, num_tokens)),
        nano_views=tuple(views),
        _cache={},
    )


def _pieces(documents: Sequence[Document], begin: int, end: int) -> Iterator[_Piece]:
    """Yields the parts of documents that lie in packed rows `begin:end`."""
    doc_begin = 0
    for index, document in enumerate(documents):
        first, last = max(begin, doc_begin), min(end, doc_begin + document.length)
        if first < last:
            yield _Piece(document, index, doc_begin, first - doc_begin, last - first)
        doc_begin += document.length


def _group_rows(view: MicroBatchView) -> RowGroups:
    """Groups the local rows of a view by adapter."""
    lengths = [0] * (view.num_slots + 1)
    tokens = []
    for piece in view.pieces:
        offset = piece.document.first_token + piece.offset
        tokens.append(torch.arange(offset, offset + piece.length))
        lengths[piece.document.slot] += piece.length
    return RowGroups(
        ends=tuple(itertools.accumulate(lengths)),
        token_index=torch.cat(tokens),
        dropout_keys=view.dropout_keys,
        row_budget=view.row_budget,
        exactness=view.exactness,
        cuts=_portion_cuts(view.pieces),
    )


def _portion_cuts(pieces: Sequence[_Piece]) -> tuple[int, ...]:
    """Returns the local rows at which another portion of the job before begins."""
    begins = itertools.accumulate(piece.length for piece in pieces)
    return tuple(
        begin
        for begin, (before, after) in zip(begins, itertools.pairwise(pieces), strict=False)
        if before.document.slot == after.document.slot
        and before.document.portion != after.document.portion
    )


_current: MicroBatchView | None = None
"""A plain global, not a context variable: autograd runs backward on threads of its own."""


def current_micro_batch() -> MicroBatchView | None:
    """Returns the micro-batch whose forward (or recompute) is running; None outside."""
    return _current


def bind_micro_batch(view: MicroBatchView | None) -> None:
    """Binds a micro-batch until the next is bound: for nano-batches (`parallel.lanes`)."""
    global _current
    _current = view


@contextmanager
def use_micro_batch(view: MicroBatchView | None) -> Iterator[None]:
    """Binds a micro-batch around a forward pass."""
    global _current
    previous, _current = _current, view
    try:
        yield
    finally:
        _current = previous


def bind_current(function: Callable[..., T]) -> Callable[..., T]:
    """Captures the micro-batch of now and restores it whenever `function` runs: for recompute."""
    view = current_micro_batch()

    def run(*args: Any, **kwargs: Any) -> T:
        with use_micro_batch(view):
            return function(*args, **kwargs)

    return run
