"""The way back of `ops.frozen.rotary` that also quantises the projection's gradient.

A block takes all heads of a row: they share one scale.

"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.frozen.parts import HeadNorms
from tlora_megatron.ops.frozen.rotary_triton import load_weight, norm_back, pairs
from tlora_megatron.ops.quantised.rows import QuantRows, hand_rows
from tlora_megatron.ops.quantised.triton_rows import (
    abs_bits,
    empty_codes,
    encode,
    power_of_2,
    rounds_by_hand,
    scale_of,
)
from tlora_megatron.ops.quantised.weight import QuantWeight
from tlora_megatron.ops.warm_kernel import WarmKernel

MOST_VALUES = 32768
"""Values of a row, with those that powers of two add, that fit a block's registers."""


@triton.jit
def _heads_of_row(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    row: tl.tensor,
    heads: tl.tensor,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """Returns the address at which each head of the projection begins in its own tensor."""
    group, member = heads // (PER_GROUP + 2), heads % (PER_GROUP + 2)
    of_query = query + (row * (GROUPS * PER_GROUP) + group * PER_GROUP + member) * DIM
    of_key = key + (row * GROUPS + group) * DIM
    of_value = value + (row * GROUPS + group) * DIM
    return tl.where(member < PER_GROUP, of_query, tl.where(member == PER_GROUP, of_key, of_value))


@triton.jit
def _pack_kernel(
    mixed: tl.tensor,  # [T, GROUPS, PER_GROUP + 2, 2 * HALF]
    query: tl.tensor,  # [T, GROUPS * PER_GROUP, 2 * HALF]
    key: tl.tensor,  # [T, GROUPS, 2 * HALF]
    value: tl.tensor,  # as key
    cos: tl.tensor,  # [T, 2 * TURNED], both halves the same
    sin: tl.tensor,  # as cos
    before: tl.tensor,  # as mixed: what forward was given, with NORMED
    query_weight: tl.tensor,  # [2 * HALF], with NORMED
    key_weight: tl.tensor,  # as query_weight
    fold: tl.tensor,  # fp32, as a row of mixed, with FOLDS
    codes: tl.tensor,  # uint8, as mixed
    scales: tl.tensor,  # fp32 [T]
    eps: tl.tensor,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    FOLDS: tl.constexpr,
    BY_HAND: tl.constexpr,
) -> None:
    dim: tl.constexpr = 2 * HALF
    num_heads: tl.constexpr = GROUPS * (PER_GROUP + 2)
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    columns = tl.max_contiguous(tl.arange(0, COLUMNS), 8)
    inside = (heads < num_heads) & (columns < HALF)[None, :]
    at1, at2 = pairs(columns, HALF, TURNED)
    at1, at2 = at1[None, :], at2[None, :]
    source = _heads_of_row(query, key, value, row, heads, GROUPS, PER_GROUP, dim)
    first = tl.load(source + at1, mask=inside, other=0.0)
    second = tl.load(source + at2, mask=inside, other=0.0)
    turns = columns < TURNED
    c = tl.load(cos + row * (2 * TURNED) + columns, mask=turns, other=1.0).to(tl.float32)[None, :]
    s = -tl.load(sin + row * (2 * TURNED) + columns, mask=turns, other=0.0).to(tl.float32)[None, :]
    x1 = first.to(tl.float32)
    x2 = second.to(tl.float32)
    y1 = x1 * c - x2 * s
    y2 = x2 * c + x1 * s
    member = heads % (PER_GROUP + 2)
    begin = row * (num_heads * dim) + heads * dim
    if NORMED:
        b1 = tl.load(before + begin + at1, mask=inside, other=0.0).to(tl.float32)
        b2 = tl.load(before + begin + at2, mask=inside, other=0.0).to(tl.float32)
        q1, q2 = load_weight(query_weight, columns, HALF, TURNED, ZERO_CENTERED)
        k1, k2 = load_weight(key_weight, columns, HALF, TURNED, ZERO_CENTERED)
        w1 = tl.where(member < PER_GROUP, q1, k1)
        w2 = tl.where(member < PER_GROUP, q2, k2)
        y1, y2 = norm_back(y1, y2, b1, b2, w1, w2, eps, HALF)
    first = tl.where(member > PER_GROUP, first, y1.to(first.dtype))
    second = tl.where(member > PER_GROUP, second, y2.to(second.dtype))
    tl.store(mixed + begin + at1, first, mask=inside)
    tl.store(mixed + begin + at2, second, mask=inside)
    v1 = first.to(tl.float32)
    v2 = second.to(tl.float32)
    if FOLDS:
        v1 *= tl.load(fold + heads * dim + at1, mask=inside, other=0.0)
        v2 *= tl.load(fold + heads * dim + at2, mask=inside, other=0.0)
    # Lanes beyond the heads may hold NaN of norms of nothing.
    sizes = tl.where(inside, tl.maximum(abs_bits(v1), abs_bits(v2)), 0)
    scale = scale_of(tl.max(tl.max(sizes, axis=1), axis=0))
    tl.store(scales + row, scale)
    inverse = tl.math.div_rn(1.0, scale)
    tl.store(codes + begin + at1, encode(v1 * inverse, BY_HAND), mask=inside)
    tl.store(codes + begin + at2, encode(v2 * inverse, BY_HAND), mask=inside)


_pack = WarmKernel(_pack_kernel)


def fits(groups: int, members: int, dim: int) -> bool:
    """Returns True if a row of heads fits a block."""
    return power_of_2(groups * members) * power_of_2(dim) <= MOST_VALUES


def pack(
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    mixed: torch.Tensor | None,
    norms: HeadNorms | None,
    column: QuantWeight,
) -> torch.Tensor:
    """Does what `triton.rotary.launch_pack` does; the gradient `[T, G (R + 2) D]` has its codes.

    Args:
        grads: of queries, keys and values, contiguous.
        column: the fused projection, whose dgrad reads the codes.
    """
    query, key, value = grads
    rows, groups, dim = key.shape
    members = query.shape[1] // groups + 2
    dmixed, fold = query.new_empty(rows, groups * members * dim), column.fold_N
    codes, scales = empty_codes(dmixed, None)
    weights, eps, flags = (cos_TD, cos_TD), 0.0, (False, False)
    if norms is not None:
        weights, eps = (norms.query.weight_H, norms.key.weight_H), norms.query.eps
        flags = (True, norms.query.zero_centered)
    heads, columns = power_of_2(groups * members), power_of_2(dim // 2)
    before = dmixed if mixed is None else mixed
    if rows:
        _pack.launch(
            rows,
            (dmixed, query, key, value, cos_TD, sin_TD, before, *weights,
             scales if fold is None else fold, codes, scales),
            (eps,),
            (groups, members - 2, dim // 2, cos_TD.shape[1] // 2, heads, columns, *flags,
             fold is not None, rounds_by_hand(query.device)),
            num_warps=max(1, min(32, heads * columns // 256)),
        )  # fmt: skip
    hand_rows(dmixed, QuantRows(codes, scales), fold)
    return dmixed
