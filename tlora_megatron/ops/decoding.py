"""Steps of generation in which every row is the next token of another sequence.

Semantics, for a row t of slot i, whose keys and values are rows J(t) of a cache:

    y[t]   = x[t] W^T + b + (scaling_i * x[t] A_i^T) B_i^T
    out[t] = sum over j of softmax(scale * q[t] k[j]) v[j],  j in J(t)

All that differs from step to step lies in tables on the device whose places and sizes stay, so that
a CUDA graph that was recorded once computes any step of its number of rows. There is no way back.

Shapes: T rows, K features in, N features out, R rank values, P partial sums, C rows of the cache, N
query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.ops.frozen.packed_attention import WHOLE, attend_in_sight
from tlora_megatron.ops.host_copy import Array
from tlora_megatron.ops.lora.linear_ops import SiteFactors
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, rank_chunks

RUN_ROWS = 16
"""Rows of one slot that a program computes; the least that tensor cores take."""
_PART_DEPTH, _MOST_PARTS = 1024, 8
"""Features that one program sums, at least, and the most programs that share a row's."""


class SlotRuns(NamedTuple):
    """Which rows belong to which adapter; those of none are in no run."""

    table: Tensor
    """int32 `[runs, 3]`: slot, first row, row behind the last; empty runs are zeros."""


class KeySpans(NamedTuple):
    """Rows of the cache that row t sees: `lens_T[t]` in `rows`, from `begins_T[t]` on; int32."""

    begins_T: Tensor
    lens_T: Tensor
    rows: Tensor


def most_runs(num_rows: int, num_slots: int) -> int:
    """Returns how many runs any step may have."""
    return min(num_rows, num_rows // RUN_ROWS + num_slots)


def slot_runs(slots: Sequence[int], num_slots: int, num_runs: int) -> Array:
    """Returns `SlotRuns.table` of rows by their slots, ascending; `num_slots` is the null slot."""
    runs, end = [], 0
    for slot, rows in groupby(slots):
        begin, end = end, end + len(list(rows))
        if slot < num_slots:
            runs += [(slot, b, min(b + RUN_ROWS, end)) for b in range(begin, end, RUN_ROWS)]
    return np.array(runs + [(0, 0, 0)] * (num_runs - len(runs)), dtype=np.int64).reshape(-1, 3)


class SlotPlaces:
    """Where each slot's factors lie in a site's arenas: `factors.cached(SlotPlaces)`."""

    def __init__(self, factors: SiteFactors) -> None:
        layout = factors.layout
        self.rows = [
            (a[0], *[x for p, rank in enumerate(ranks) for x in (b[p], rank_chunks(rank))])
            for a, b, ranks in zip(layout.a_begin, layout.b_begin, layout.ranks, strict=True)
        ]
        """A slot: its first row of A, and of each target the first row of B and the chunks."""
        self.width = RANK_CHUNK * max(sum(row[2::2]) for row in self.rows)
        """R."""
        self.table = torch.tensor(self.rows, dtype=torch.int32, device=factors.lora_a.device)
        self.num_parts = max(1, min(_MOST_PARTS, factors.size_in // _PART_DEPTH))
        """P."""
        sizes = (x for c in factors.columns for x in (c.width, c.stride, c.begin, c.size))
        self.is_aligned = not any(size % 16 for size in sizes)
        """True if all columns begin and end at multiples of 16."""


def down_reference(x_TK: Tensor, factors: SiteFactors, runs: SlotRuns) -> Tensor:
    """The definition of s `[1, T, R]`, fp32; it holds anything where an adapter has no rank."""
    places = factors.cached(SlotPlaces)
    s_TR = x_TK.new_zeros(len(x_TK), places.width, dtype=torch.float32)
    for slot, begin, end in runs.table.tolist():
        first, width = places.rows[slot][0], RANK_CHUNK * sum(places.rows[slot][2::2])
        product = x_TK[begin:end] @ factors.lora_a[first : first + width].t()
        s_TR[begin:end, :width] = product.float() * factors.scaling[slot]
    return s_TR[None]


def add_up_reference(y_TN: Tensor, s_PTR: Tensor, factors: SiteFactors, runs: SlotRuns) -> None:
    """The definition of `y += s B^T`."""
    places, s_TR = factors.cached(SlotPlaces), s_PTR.sum(0).to(y_TN.dtype)
    for slot, begin, end in runs.table.tolist():
        column = 0
        for p, columns in enumerate(factors.columns):
            first, chunks = places.rows[slot][1 + 2 * p : 3 + 2 * p]
            width = RANK_CHUNK * chunks
            lora_b_RN = factors.lora_b[p][first : first + width]
            columns.add(y_TN[begin:end], s_TR[begin:end, column : column + width] @ lora_b_RN)
            column += width


def attend_cached_reference(
    q_TND: Tensor, k_CGD: Tensor, v_CGD: Tensor, spans: KeySpans, scale: float
) -> Tensor:
    """The definition of `attend_cached`."""
    pairs = zip(spans.begins_T.tolist(), spans.lens_T.tolist(), strict=True)
    rows = [spans.rows[begin : begin + length] for begin, length in pairs]
    parts = [
        attend_in_sight(q_TND[t : t + 1], k_CGD[own], v_CGD[own], scale, WHOLE)
        for t, own in enumerate(rows)
    ]
    return torch.cat(parts)
