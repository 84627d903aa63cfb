"""Routing of a step of generation: some documents begin behind tokens that the model has seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tlora_megatron.integrations.megatron.generation.key_cache import KeyCache
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.routing import (
    AttentionSpans,
    Document,
    MicroBatchView,
    pack_micro_batch,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """New tokens of one sequence."""

    slot: int
    """Slot of its adapter; the null slot = the base alone."""
    past: int
    """Tokens of it that the cache holds."""
    tokens: tuple[int, ...]
    rows: Sequence[int]
    """Cache rows of its tokens from the first on; at least those of past and new ones."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GrowingView(MicroBatchView):
    """A micro-batch whose documents attend to their pasts in a cache, too."""

    growths: tuple[Growth, ...]
    """One a document, in order."""
    cache: KeyCache

    def _attention(self) -> AttentionSpans:
        q_lens = tuple(len(growth.tokens) for growth in self.growths)
        k_lens = tuple(growth.past + len(growth.tokens) for growth in self.growths)
        begins = itertools.accumulate(k_lens[:-1], initial=0)
        return AttentionSpans(q_lens, tuple(begins), k_lens)

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
            rows = [
                row
                for growth, begin in zip(self.growths, begins, strict=True)
                for row in itertools.islice(growth.rows, begin, growth.past + len(growth.tokens))
            ]
            return to_device(torch.tensor(rows), device)

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
