"""Kernels of `ops.frozen.rotary`: heads move between Megatron's interleaved layout and tensors of
their own; queries and keys are normed, if the model norms them, and turn on the way. Before an FP8
projection the way back also quantises: a block takes all heads of a row, which share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.frozen.parts import HeadNorms
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

_ROWS = 32
"""Rows of a thread block, which takes one head of each: 4,096 elements at head dimension 128."""
_WARPS = 4
_MOST_VALUES = 32768
"""Values of a quantised row, with those that powers of two add, that fit a block's registers."""


@triton.jit
def _pairs(
    columns: tl.tensor, HALF: tl.constexpr, TURNED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Where both members of each pair lie in a head: first the pairs that turn, then the others."""
    if TURNED == HALF:
        return columns, columns + HALF
    turns = columns < TURNED
    first = tl.where(turns, columns, columns + TURNED)
    return first, tl.where(turns, columns + TURNED, columns + HALF)


@triton.jit
def _load_weight(
    weight: tl.tensor,
    columns: tl.tensor,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The weight of a norm of heads, where both members of each pair lie."""
    at1, at2 = _pairs(columns, HALF, TURNED)
    first = tl.load(weight + at1, mask=columns < HALF, other=0.0).to(tl.float32)
    second = tl.load(weight + at2, mask=columns < HALF, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        first += 1.0
        second += 1.0
    return first[None, :], second[None, :]


@triton.jit
def _one_over_rms(x1: tl.tensor, x2: tl.tensor, eps: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    return tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * HALF) + eps)[:, None]


@triton.jit
def _norm(
    x1: tl.tensor, x2: tl.tensor, w1: tl.tensor, w2: tl.tensor, eps: tl.tensor, dtype: tl.constexpr,
    HALF: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    scale = _one_over_rms(x1, x2, eps, HALF)
    x1 *= scale
    x2 *= scale
    if not ROUNDS_ONCE:
        x1 = x1.to(dtype).to(tl.float32)
        x2 = x2.to(dtype).to(tl.float32)
    # What the model's own norm hands to the rotation.
    return (x1 * w1).to(dtype).to(tl.float32), (x2 * w2).to(dtype).to(tl.float32)


@triton.jit
def _norm_back(
    d1: tl.tensor, d2: tl.tensor, x1: tl.tensor, x2: tl.tensor, w1: tl.tensor, w2: tl.tensor,
    eps: tl.tensor, HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The way back through a norm of heads `(x1, x2)`."""
    scale = _one_over_rms(x1, x2, eps, HALF)
    d1 *= w1
    d2 *= w2
    x1 *= scale
    x2 *= scale
    share = (tl.sum(d1 * x1 + d2 * x2, axis=1) / (2 * HALF))[:, None]
    return (d1 - x1 * share) * scale, (d2 - x2 * share) * scale


@triton.jit
def _move_head(
    mixed: tl.tensor, apart: tl.tensor, cos: tl.tensor, sin: tl.tensor, before: tl.tensor,
    weight: tl.tensor, eps: tl.tensor, rows: tl.tensor, inside: tl.tensor, columns: tl.tensor,
    MIXED_WIDTH: tl.constexpr, APART_WIDTH: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr,
    ROTATE: tl.constexpr, BACKWARD: tl.constexpr, NORMED: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
) -> None:  # fmt: skip
    at1, at2 = _pairs(columns, HALF, TURNED)
    source = mixed + rows[:, None] * MIXED_WIDTH
    target = apart + rows[:, None] * APART_WIDTH
    if BACKWARD:
        source, target = target, source
    first = tl.load(source + at1[None, :], mask=inside, other=0.0)
    second = tl.load(source + at2[None, :], mask=inside, other=0.0)
    if ROTATE:
        angle = rows[:, None] * (2 * TURNED) + columns[None, :]
        turns = inside & (columns < TURNED)[None, :]
        c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
        if BACKWARD:
            s = -s
        x1 = first.to(tl.float32)
        x2 = second.to(tl.float32)
        if NORMED:
            w1, w2 = _load_weight(weight, columns, HALF, TURNED, ZERO_CENTERED)
            if not BACKWARD:
                x1, x2 = _norm(x1, x2, w1, w2, eps, first.dtype, HALF, ROUNDS_ONCE)
        y1 = x1 * c - x2 * s
        y2 = x2 * c + x1 * s
        if NORMED and BACKWARD:
            row = before + rows[:, None] * MIXED_WIDTH
            b1 = tl.load(row + at1[None, :], mask=inside, other=0.0).to(tl.float32)
            b2 = tl.load(row + at2[None, :], mask=inside, other=0.0).to(tl.float32)
            y1, y2 = _norm_back(y1, y2, b1, b2, w1, w2, eps, HALF)
        first = y1.to(first.dtype)
        second = y2.to(second.dtype)
    tl.store(target + at1[None, :], first, mask=inside)
    tl.store(target + at2[None, :], second, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_heads_kernel(
    mixed: tl.tensor,  # [T, GROUPS, PER_GROUP + 2, 2 * HALF]
    query: tl.tensor,  # [T, GROUPS * PER_GROUP, 2 * HALF]
    key: tl.tensor,  # [T, GROUPS, 2 * HALF]
    value: tl.tensor,  # as key
    cos: tl.tensor,  # [T, 2 * TURNED], both halves the same
    sin: tl.tensor,  # as cos
    before: tl.tensor,  # as mixed: what forward was given, with NORMED and BACKWARD
    query_weight: tl.tensor,  # [2 * HALF], with NORMED
    key_weight: tl.tensor,  # as query_weight
    num_rows: tl.tensor,
    eps: tl.tensor,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,  # pairs of a head that turn, of HALF
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BACKWARD: tl.constexpr,
    NORMED: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,  # behind the weight only
    ZERO_CENTERED: tl.constexpr,  # weights are held less 1
) -> None:
    heads: tl.constexpr = GROUPS * (PER_GROUP + 2)
    dim: tl.constexpr = 2 * HALF
    head = tl.program_id(0) % heads
    group = head // (PER_GROUP + 2)
    member = head % (PER_GROUP + 2)
    rows = (tl.program_id(0) // heads).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < HALF)[None, :]
    source = mixed + head * dim
    query_at = query + (group * PER_GROUP + member) * dim
    mixed_width: tl.constexpr = heads * dim
    query_width: tl.constexpr = GROUPS * PER_GROUP * dim
    key_width: tl.constexpr = GROUPS * dim
    if member < PER_GROUP:
        _move_head(
            source, query_at, cos, sin, before + head * dim, query_weight, eps,
            rows, inside, columns, mixed_width, query_width, HALF, TURNED, True,
            BACKWARD, NORMED, ROUNDS_ONCE, ZERO_CENTERED,
        )  # fmt: skip
    elif member == PER_GROUP:
        _move_head(
            source, key + group * dim, cos, sin, before + head * dim, key_weight, eps,
            rows, inside, columns, mixed_width, key_width, HALF, TURNED, True,
            BACKWARD, NORMED, ROUNDS_ONCE, ZERO_CENTERED,
        )  # fmt: skip
    else:
        _move_head(
            source, value + group * dim, cos, sin, before + head * dim, key_weight, eps,
            rows, inside, columns, mixed_width, key_width, HALF, TURNED, False,
            BACKWARD, NORMED, ROUNDS_ONCE, ZERO_CENTERED,
        )  # fmt: skip


@triton.jit
def _heads_of_row(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, row: tl.tensor, heads: tl.tensor,
    GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
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
    at1, at2 = _pairs(columns, HALF, TURNED)
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
        q1, q2 = _load_weight(query_weight, columns, HALF, TURNED, ZERO_CENTERED)
        k1, k2 = _load_weight(key_weight, columns, HALF, TURNED, ZERO_CENTERED)
        w1 = tl.where(member < PER_GROUP, q1, k1)
        w2 = tl.where(member < PER_GROUP, q2, k2)
        y1, y2 = _norm_back(y1, y2, b1, b2, w1, w2, eps, HALF)
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


_rotate_heads = WarmKernel(_rotate_heads_kernel)
_pack = WarmKernel(_pack_kernel)


def launch_unpack(
    mixed: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, and values, of contiguous `[T, G, R + 2, D]`."""
    rows, groups, members, dim = mixed.shape
    query = mixed.new_empty(rows, groups * (members - 2), dim)
    key, value = (mixed.new_empty(rows, groups, dim) for _ in range(2))
    _launch(mixed, (query, key, value), cos_TD, sin_TD, mixed, norms, backward=False)
    return query, key, value


def launch_pack(
    dq_TND: torch.Tensor,
    dk_TGD: torch.Tensor,
    dv_TGD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    mixed: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
    column: QuantWeight | None = None,
) -> torch.Tensor:
    """Gradient of `launch_unpack`'s input from contiguous ones of its outputs.

    Args:
        mixed: that input; read where heads are normed.
        column: the fused projection: the gradient, now `[T, G (R + 2) D]`, has codes for its dgrad.
    """
    rows, groups, dim = dk_TGD.shape
    members = dq_TND.shape[1] // groups + 2
    dmixed = dq_TND.new_empty(rows, groups * members * dim)
    parts, before = (dq_TND, dk_TGD, dv_TGD), dmixed if mixed is None else mixed
    heads, columns = power_of_2(groups * members), power_of_2(dim // 2)
    if column is None or heads * power_of_2(dim) > _MOST_VALUES:
        apart = dmixed.view(rows, groups, members, dim)
        _launch(apart, parts, cos_TD, sin_TD, before, norms, backward=True)
        return apart if column is None else dmixed
    fold, (codes, scales) = column.fold_N, empty_codes(dmixed, None)
    weights, eps, (normed, _, zero_centered) = _norm_arguments(norms, cos_TD)
    if rows:
        _pack.launch(
            rows,
            (dmixed, *parts, cos_TD, sin_TD, before, *weights,
             scales if fold is None else fold, codes, scales),
            (eps,),
            (groups, members - 2, dim // 2, cos_TD.shape[1] // 2, heads, columns, normed,
             zero_centered, fold is not None, rounds_by_hand(dmixed.device)),
            num_warps=max(1, min(32, heads * columns // 256)),
        )  # fmt: skip
    hand_rows(dmixed, QuantRows(codes, scales), fold)
    return dmixed


def _launch(
    mixed: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    before: torch.Tensor,
    norms: HeadNorms | None,
    *,
    backward: bool,
) -> None:
    num_rows, groups, members, dim = mixed.shape
    turned, columns = cos_TD.shape[1] // 2, power_of_2(dim // 2)
    weights, eps, flags = _norm_arguments(norms, cos_TD)
    _rotate_heads.launch(
        groups * members * -(-num_rows // _ROWS),
        (mixed, *parts, cos_TD, sin_TD, before, *weights),
        (num_rows, eps),
        (groups, members - 2, dim // 2, turned, _ROWS, columns, backward, *flags),
        num_warps=_WARPS,
    )


def _norm_arguments(
    norms: HeadNorms | None, unused: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], float, tuple[bool, bool, bool]]:
    """Returns weights, eps, and whether heads are normed, once rounded, of centred weights."""
    if norms is None:
        return (unused, unused), 0.0, (False, False, False)
    query, key = norms
    return (query.weight_H, key.weight_H), query.eps, (True, query.rounds_once, query.zero_centered)
