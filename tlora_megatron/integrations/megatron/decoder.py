"""Steps in which every sequence gets one token: one CUDA graph for each of a few numbers of rows.

A graph is recorded at the second step of its size, since the first one compiles and allocates, and
forgotten when adapters move. What a step reads (tokens, adapters' rows, rows of the cache) goes to
the device in one copy, to where the graphs look for it. Rows that are left over compute token 0 in
a row of the cache that no sequence has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.integrations.megatron.key_cache import Growth, KeyCache
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.ops.decoding import KeySpans, SlotRuns, most_runs, slot_runs
from tlora_megatron.ops.host_copy import Array
from tlora_megatron.ops.routing import MicroBatchView

logger = logging.getLogger(__name__)

_ROOM = 1 << 18
"""Numbers that a step has room for at first: 1 MB."""


def bucket_of(num_rows: int) -> int:
    """Returns the rows that a step is computed with: the next power of two."""
    return 1 << (num_rows - 1).bit_length()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecodeView(MicroBatchView):
    """Rows that are the next tokens of sequences in a cache."""

    cache: KeyCache
    tokens: Tensor
    places: Tensor
    """Position of every row in its sequence, int32 `[num_tokens]`."""
    written: Tensor
    """Row of the cache that its key goes to, int32 `[num_tokens]`."""
    spans: KeySpans
    runs: SlotRuns

    @property
    def rows(self) -> Any:
        return self.runs

    def positions(self, device: torch.device) -> Tensor:
        return self.cached("places", self.places.long)

    def new_rows(self, device: torch.device) -> Tensor:
        """Does what `GrowingView`'s does."""
        return self.cached("written", self.written.long)


def pack_step(growths: Sequence[Growth], num_slots: int, scratch: int) -> Array:
    """Returns all numbers of a step, of which `view_of` makes a view.

    Args:
        growths: of one token each, in ascending order of slot.
        scratch: the row of the cache for rows that are left over.
    """
    size = bucket_of(len(growths))
    held = [np.asarray(growth.rows[: growth.past + 1]) for growth in growths]
    held += [np.array([scratch])] * (size - len(growths))
    tokens = [growth.tokens[0] for growth in growths] + [0] * (size - len(growths))
    lens = np.array([len(own) for own in held])
    header = (tokens, lens - 1, [own[-1] for own in held], lens.cumsum() - lens, lens)
    slots = [growth.slot for growth in growths]
    runs = slot_runs(slots, num_slots, most_runs(size, num_slots))
    return np.concatenate([*header, runs.ravel(), *held])


def view_of(numbers: Tensor, size: int, num_slots: int, cache: KeyCache) -> DecodeView:
    """Returns the view of a step whose numbers lie in an int32 tensor."""
    tokens, places, written, begins, lens = numbers[: 5 * size].view(5, size)
    end = 5 * size + 3 * most_runs(size, num_slots)
    return DecodeView(
        documents=(),
        num_slots=num_slots,
        num_tokens=size,
        cp_rank=0,
        cp_size=1,
        dropout_keys=(),
        pieces=(),
        row_budget=size,
        cache=cache,
        tokens=tokens,
        places=places,
        written=written,
        spans=KeySpans(begins, lens, numbers[end:]),
        runs=SlotRuns(numbers[5 * size : end].view(-1, 3)),
    )


class Decoder:
    """Computes steps of single tokens.

    Args:
        compute: gives the hidden states `[T, H]` of a view's tokens.
        records: record CUDA graphs; False = run every step's kernels one by one.
    """

    def __init__(
        self,
        compute: Callable[[DecodeView, Tensor], Tensor],
        cache: KeyCache,
        bank: AdapterBank,
        *,
        records: bool,
    ) -> None:
        self._compute = compute
        self._cache = cache
        self._bank = bank
        self.records = records
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """By the number of rows, with where its hidden states lie."""
        self._seen: set[int] = set()
        self._adapters: Any = None
        self._numbers = torch.zeros(0, dtype=torch.int32, device=bank.device)

    def step(self, growths: Sequence[Growth], num_slots: int) -> Tensor:
        """Returns their hidden states, which hold until the next step."""
        numbers = pack_step(growths, num_slots, self._cache.scratch_row)
        is_full = len(numbers) > len(self._numbers)
        if is_full or self._adapters is not self._bank.adapters:
            self.graphs.clear()
            self._seen.clear()
            self._adapters = self._bank.adapters
        if is_full:
            self._numbers = self._numbers.new_zeros(max(_ROOM, 2 * len(numbers)))
        is_pinned = self._numbers.is_cuda
        host = torch.empty(len(numbers), dtype=torch.int32, pin_memory=is_pinned)
        host.numpy()[:] = numbers
        self._numbers[: len(numbers)].copy_(host, non_blocking=is_pinned)
        size = bucket_of(len(growths))
        if self.records and size in self._seen and size not in self.graphs:
            self._record(size, num_slots)
        self._seen.add(size)
        if size not in self.graphs:
            view = view_of(self._numbers, size, num_slots, self._cache)
            return self._compute(view, view.tokens.long())[: len(growths)]
        graph, hidden_TH = self.graphs[size]
        graph.replay()
        return hidden_TH[: len(growths)]

    def _record(self, size: int, num_slots: int) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        pool = next((known.pool() for known, _ in self.graphs.values()), None)
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                view = view_of(self._numbers, size, num_slots, self._cache)
                hidden_TH = self._compute(view, view.tokens.long())
        except Exception as error:  # whatever a model does that cannot be recorded
            logger.warning("decoding runs without CUDA graphs: %s", error)
            torch.cuda.set_stream(stream)  # a recording that cannot be ended leaves its own
            self.records = False
            self.graphs.clear()
            return
        self.graphs[size] = graph, hidden_TH
