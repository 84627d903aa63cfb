"""Keys and values of sequences that grow, and the routing of steps that begin behind them.

Megatron-core's own inference contexts (0.16.1) know no packed rows that belong to adapters.

Shapes: R rows of the cache, T rows of a step, K keys of its documents, G key-value heads, D head
dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.ops.host_copy import Array, to_device
from tlora_megatron.ops.routing import AttentionSpans, Document, MicroBatchView, pack_micro_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """The sizes of a cache on this process."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Memory of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KeyCache:
    """Rows for keys and values of tokens; a row belongs to one sequence, or to several as a prefix.

    Rows are reserved by the token: a sequence takes all that it may ever need before it starts, so
    none has to be thrown out later.
    """

    def __init__(self, shape: CacheShape, num_rows: int, device: torch.device) -> None:
        self.shape = shape
        self.num_rows = num_rows
        self.scratch_row = num_rows
        """One more, which nobody reads: rows of a step that no sequence has write it."""
        sizes = (num_rows + 1, shape.num_kv_heads, shape.head_dim)
        rooms = [
            torch.empty(sizes, dtype=shape.dtype, device=device)
            for _ in range(2 * shape.num_layers)
        ]
        self._keys, self._values = rooms[: shape.num_layers], rooms[shape.num_layers :]
        self._free = list(range(num_rows))

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def reserve(self, count: int) -> Array | None:
        """Takes rows; None if fewer are free."""
        if count > len(self._free):
            return None
        first = len(self._free) - count
        taken = self._free[first:]
        del self._free[first:]
        return np.array(taken, dtype=np.int64)

    def release(self, rows: Array) -> None:
        """Gives rows back."""
        self._free += rows.tolist()

    def write(
        self, layer: int, key_TGD: Tensor, value_TGD: Tensor, new_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of new rows, int64; returns those of the whole cache."""
        keys, values = self._keys[layer], self._values[layer]
        keys[new_T], values[new_T] = key_TGD, value_TGD
        return keys, values


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """New tokens of one sequence."""

    slot: int
    """Slot of its adapter; the null slot = the base alone."""
    past: int
    """Tokens of it that the cache holds."""
    tokens: tuple[int, ...]
    rows: Array
    """Cache rows of its tokens from the first on; at least those of past and new ones."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GrowingView(MicroBatchView):
    """A micro-batch whose documents attend to their pasts in a cache, too."""

    growths: tuple[Growth, ...]
    """One a document, in order."""
    cache: KeyCache

    @property
    def attention(self) -> AttentionSpans:
        def build() -> AttentionSpans:
            q_lens = tuple(len(growth.tokens) for growth in self.growths)
            k_lens = tuple(growth.past + len(growth.tokens) for growth in self.growths)
            begins = itertools.accumulate(k_lens[:-1], initial=0)
            return AttentionSpans(q_lens, tuple(begins), k_lens)

        return self.cached("attention", build)

    def positions(self, device: torch.device) -> Tensor:
        """Position of every new token in its whole sequence, int64 `[num_tokens]`."""

        def build() -> Tensor:
            runs = [torch.arange(g.past, g.past + len(g.tokens)) for g in self.growths]
            return to_device(torch.cat(runs), device)

        return self.cached(f"positions@{device}", build)

    def new_rows(self, device: torch.device) -> Tensor:
        """Cache row of every new token, int64 `[T]`."""
        return self._rows_from("new", [growth.past for growth in self.growths], device)

    def key_rows(self, device: torch.device) -> Tensor:
        """Cache rows of the keys that each document sees, one after another, int64 `[K]`."""
        return self._rows_from("keys", [0] * len(self.growths), device)

    def _rows_from(self, name: str, begins: Sequence[int], device: torch.device) -> Tensor:
        def build() -> Tensor:
            pairs = zip(self.growths, begins, strict=True)
            rows = [g.rows[begin : g.past + len(g.tokens)] for g, begin in pairs]
            return to_device(torch.from_numpy(np.concatenate(rows)), device)

        return self.cached(f"cache rows.{name}@{device}", build)


def growing_view(
    growths: Sequence[Growth], cache: KeyCache, *, num_slots: int, row_budget: int
) -> GrowingView:
    """Packs a step.

    Args:
        growths: in ascending order of slot.
        row_budget: the most tokens of any step.
    """
    num_tokens = sum(len(growth.tokens) for growth in growths)
    documents = [Document(slot=growth.slot, length=len(growth.tokens)) for growth in growths]
    view = pack_micro_batch(
        documents, num_slots=num_slots, num_tokens=num_tokens, token_budget=row_budget
    )
    packed = {field.name: getattr(view, field.name) for field in fields(MicroBatchView)}
    packed["_cache"] = {}
    return GrowingView(**packed, growths=tuple(growths), cache=cache)
