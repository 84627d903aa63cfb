"""Kernels of `ops.decoding`: products with the factors of few rows, and attention over a cache.

A program reads what it multiplies once, for up to 16 rows: a step is bound by memory. Sums are
fp32, in an order that no other row decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.decoding import RUN_ROWS, KeySpans, SlotPlaces, SlotRuns
from tlora_megatron.ops.lora.linear_ops import SiteFactors, SiteTables
from tlora_megatron.ops.lora.tiling import RANK_CHUNK

_DEPTH, _COLUMNS, _KEYS = 128, 128, 64
"""Features, columns and keys that a step of a program reads."""


@triton.jit
def _down_kernel(
    x: tl.tensor, lora_a: tl.tensor, s: tl.tensor, runs: tl.tensor, places: tl.tensor,
    scaling: tl.tensor, num_rows: tl.tensor, DEPTH: tl.constexpr, PART: tl.constexpr,
    WIDTH: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    run = runs + 3 * tl.program_id(0)
    slot, begin, end = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    place = places + slot * FIELDS
    chunks = 0
    for field in range(2, FIELDS, 2):
        chunks += tl.load(place + field)
    chunk, part = tl.program_id(1), tl.program_id(2)
    if (begin < end) & (chunk < chunks):
        rows, rank = begin + tl.arange(0, M), tl.arange(0, CHUNK)
        live = (rows < end)[:, None]
        x_rows = x + rows.to(tl.int64)[:, None] * DEPTH
        factor = (tl.load(place) + chunk * CHUNK + rank).to(tl.int64)
        a_rows = lora_a + factor[:, None] * DEPTH
        sums = tl.zeros([M, CHUNK], dtype=tl.float32)
        last = tl.minimum((part + 1) * PART, DEPTH)
        for first in range(part * PART, last, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = (columns < last)[None, :]
            values = tl.load(x_rows + columns[None, :], mask=live & inside, other=0.0)
            weights = tl.load(a_rows + columns[None, :], mask=inside, other=0.0)
            sums = tl.dot(values, tl.trans(weights), sums, input_precision="ieee")
        out = s + (part * num_rows + rows)[:, None] * WIDTH + (chunk * CHUNK + rank)[None, :]
        tl.store(out, sums * tl.load(scaling + slot), mask=live)


@triton.jit
def _up_kernel(
    y: tl.tensor, s: tl.tensor, runs: tl.tensor, places: tl.tensor, lora_b: tl.tensor,
    columns_of: tl.tensor, num_rows: tl.tensor, NUM_COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, TARGETS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    M: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    run = runs + 3 * tl.program_id(0)
    slot, begin, end = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    if begin < end:
        rows, rank = begin + tl.arange(0, M), tl.arange(0, CHUNK)
        live = (rows < end)[:, None]
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < NUM_COLUMNS
        sums = tl.zeros([M, BLOCK], dtype=tl.float32)
        place = places + slot * (1 + 2 * TARGETS) + 1
        before = s + rows[:, None] * WIDTH + rank[None, :]
        for p in range(TARGETS):
            width, stride = tl.load(columns_of + 4 * p), tl.load(columns_of + 4 * p + 1)
            first, size = tl.load(columns_of + 4 * p + 2), tl.load(columns_of + 4 * p + 3)
            weight = tl.load(lora_b + p).to(tl.pointer_type(y.dtype.element_ty))
            if ALIGNED:
                width, stride = tl.multiple_of(width, 16), tl.multiple_of(stride, 16)
                first, size = tl.multiple_of(first, 16), tl.multiple_of(size, 16)
                weight = tl.multiple_of(weight, 16)
            offset = columns % stride - first
            mine = inside & (offset >= 0) & (offset < width)
            compact = columns // stride * width + offset
            chunks = tl.load(place + 2 * p + 1)
            if tl.max(mine.to(tl.int32), 0) > 0:
                for chunk in range(chunks):
                    ranked = tl.zeros([M, CHUNK], dtype=tl.float32)
                    for part in range(PARTS):
                        values = before + part * num_rows * WIDTH + chunk * CHUNK
                        ranked += tl.load(values, mask=live, other=0.0)
                    lines = (tl.load(place + 2 * p) + chunk * CHUNK + rank).to(tl.int64)
                    pointers = weight + lines[:, None] * size + compact[None, :]
                    factor = tl.load(pointers, mask=mine[None, :], other=0.0)
                    ranked = ranked.to(factor.dtype)
                    sums = tl.dot(ranked, factor, sums, input_precision="ieee")
            before += chunks * CHUNK
        out = y + rows.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
        mask = live & inside[None, :]
        tl.store(out, (tl.load(out, mask=mask).to(tl.float32) + sums).to(y.dtype.element_ty), mask)


@triton.jit
def _attention_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, begins: tl.tensor, lens: tl.tensor,
    rows: tl.tensor, scale: tl.tensor, GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(1)
    head, dim = tl.arange(0, M), tl.arange(0, D)
    live = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    own = (row * GROUPS + group).to(tl.int64) * HEADS * DIM + head[:, None] * DIM + dim[None, :]
    query = tl.load(q + own, mask=live, other=0.0)
    begin, length = tl.load(begins + row), tl.load(lens + row)
    most = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    sums = tl.zeros([M, D], dtype=tl.float32)
    for first in range(0, length, BLOCK):
        place = first + tl.arange(0, BLOCK)
        seen = place < length
        line = tl.load(rows + begin + place, mask=seen, other=0).to(tl.int64)
        at = ((line * GROUPS + group) * DIM)[:, None] + dim[None, :]
        mask = seen[:, None] & (dim < DIM)[None, :]
        key = tl.load(k + at, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        shares = tl.exp(scores - higher[:, None])
        kept = tl.exp(most - higher)
        value = tl.load(v + at, mask=mask, other=0.0)
        total = total * kept + tl.sum(shares, 1)
        product = tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        sums = sums * kept[:, None] + product
        most = higher
    tl.store(out + own, (sums / total[:, None]).to(out.dtype.element_ty), mask=live)


def launch_down(x_TK: Tensor, factors: SiteFactors, runs: SlotRuns) -> Tensor:
    """Returns s `[P, T, R]`, fp32; rows and ranks that no adapter has hold anything."""
    places, (num_rows, depth) = factors.cached(SlotPlaces), x_TK.shape
    parts, width = places.num_parts, places.width
    s = x_TK.new_empty(parts, num_rows, width, dtype=torch.float32)
    part_depth = -(-depth // parts // _DEPTH) * _DEPTH
    _down_kernel[(len(runs.table), width // RANK_CHUNK, parts)](
        x_TK, factors.lora_a, s, runs.table, places.table, factors.scaling,
        num_rows, DEPTH=depth, PART=part_depth, WIDTH=width, FIELDS=places.table.shape[1],
        BLOCK=_DEPTH, M=RUN_ROWS, CHUNK=RANK_CHUNK, num_warps=4,
    )  # fmt: skip
    return s


def launch_up(y_TN: Tensor, s_PTR: Tensor, factors: SiteFactors, runs: SlotRuns) -> None:
    """Adds `s B^T` to y."""
    places, tables = factors.cached(SlotPlaces), factors.cached(SiteTables)
    parts, num_rows, width = s_PTR.shape
    _up_kernel[(len(runs.table), triton.cdiv(y_TN.shape[1], _COLUMNS))](
        y_TN, s_PTR, runs.table, places.table, tables.lora_b, tables.columns,
        num_rows, NUM_COLUMNS=y_TN.shape[1], WIDTH=width, PARTS=parts, TARGETS=len(factors.columns),
        ALIGNED=places.is_aligned and tables.aligned_lora_b,
        BLOCK=_COLUMNS, M=RUN_ROWS, CHUNK=RANK_CHUNK, num_warps=4,
    )  # fmt: skip


def launch_attention(
    q_TND: Tensor, k_CGD: Tensor, v_CGD: Tensor, spans: KeySpans, scale: float
) -> Tensor:
    """Returns `[T, N, D]`; a program has the query heads of one group."""
    num_rows, heads, dim = q_TND.shape
    groups, out = k_CGD.shape[1], torch.empty_like(q_TND)
    _attention_kernel[(num_rows, groups)](
        q_TND, k_CGD, v_CGD, out, spans.begins_T, spans.lens_T, spans.rows, scale,
        GROUPS=groups, HEADS=heads // groups, DIM=dim, BLOCK=_KEYS, num_warps=4,
        M=max(16, triton.next_power_of_2(heads // groups)),
        D=max(16, triton.next_power_of_2(dim)),
    )  # fmt: skip
    return out
