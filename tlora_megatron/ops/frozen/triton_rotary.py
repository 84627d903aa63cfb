"""Kernel of `ops.frozen.qkv_rotary`: heads move between Megatron's interleaved layout and tensors
of their own, and queries and keys turn on the way."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.warm_kernel import WarmKernel

_ROWS = 32
"""Rows of a thread block, which takes one head of each: 4,096 elements at head dimension 128."""
_WARPS = 4


@triton.jit
def _move_head(
    mixed: tl.tensor,
    apart: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    rows: tl.tensor,
    inside: tl.tensor,
    columns: tl.tensor,
    MIXED_WIDTH: tl.constexpr,
    APART_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    ROTATE: tl.constexpr,
    BACKWARD: tl.constexpr,
) -> None:
    source = mixed + rows[:, None] * MIXED_WIDTH + columns[None, :]
    target = apart + rows[:, None] * APART_WIDTH + columns[None, :]
    if BACKWARD:
        source, target = target, source
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    if ROTATE:
        angle = rows[:, None] * (2 * HALF) + columns[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        if BACKWARD:
            s = -s
        x1 = first.to(tl.float32)
        x2 = second.to(tl.float32)
        first = (x1 * c - x2 * s).to(first.dtype)
        second = (x2 * c + x1 * s).to(second.dtype)
    tl.store(target, first, mask=inside)
    tl.store(target + HALF, second, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_heads_kernel(
    mixed: tl.tensor,  # [T, GROUPS, PER_GROUP + 2, 2 * HALF]
    query: tl.tensor,  # [T, GROUPS * PER_GROUP, 2 * HALF]
    key: tl.tensor,  # [T, GROUPS, 2 * HALF]
    value: tl.tensor,  # as key
    cos: tl.tensor,  # [T, 2 * HALF], both halves the same
    sin: tl.tensor,  # as cos
    num_rows: tl.tensor,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BACKWARD: tl.constexpr,
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
    if member < PER_GROUP:
        _move_head(
            source,
            query + (group * PER_GROUP + member) * dim,
            cos,
            sin,
            rows,
            inside,
            columns,
            MIXED_WIDTH=heads * dim,
            APART_WIDTH=GROUPS * PER_GROUP * dim,
            HALF=HALF,
            ROTATE=True,
            BACKWARD=BACKWARD,
        )
    elif member == PER_GROUP:
        _move_head(
            source,
            key + group * dim,
            cos,
            sin,
            rows,
            inside,
            columns,
            MIXED_WIDTH=heads * dim,
            APART_WIDTH=GROUPS * dim,
            HALF=HALF,
            ROTATE=True,
            BACKWARD=BACKWARD,
        )
    else:
        _move_head(
            source,
            value + group * dim,
            cos,
            sin,
            rows,
            inside,
            columns,
            MIXED_WIDTH=heads * dim,
            APART_WIDTH=GROUPS * dim,
            HALF=HALF,
            ROTATE=False,
            BACKWARD=BACKWARD,
        )


_rotate_heads = WarmKernel(_rotate_heads_kernel)


def launch_unpack(
    mixed: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, and values, of contiguous `[T, G, R + 2, D]`."""
    rows, groups, members, dim = mixed.shape
    query = mixed.new_empty(rows, groups * (members - 2), dim)
    key, value = (mixed.new_empty(rows, groups, dim) for _ in range(2))
    _launch(mixed, (query, key, value), cos_TD, sin_TD, backward=False)
    return query, key, value


def launch_pack(
    dq_TND: torch.Tensor,
    dk_TGD: torch.Tensor,
    dv_TGD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
) -> torch.Tensor:
    """Gradient of `launch_unpack`'s input from contiguous ones of its outputs."""
    rows, groups, dim = dk_TGD.shape
    dmixed = dq_TND.new_empty(rows, groups, dq_TND.shape[1] // groups + 2, dim)
    _launch(dmixed, (dq_TND, dk_TGD, dv_TGD), cos_TD, sin_TD, backward=True)
    return dmixed


def _launch(
    mixed: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    *,
    backward: bool,
) -> None:
    num_rows, groups, members, dim = mixed.shape
    _rotate_heads.launch(
        groups * members * -(-num_rows // _ROWS),
        (mixed, *parts, cos_TD, sin_TD),
        (num_rows,),
        (groups, members - 2, dim // 2, _ROWS, _columns(dim // 2), backward),
        num_warps=_WARPS,
    )


@functools.cache
def _columns(half: int) -> int:
    """Columns of a thread block; `next_power_of_2` is a Triton function, slow to call."""
    return triton.next_power_of_2(half)
