"""The kernel of `ops.adamw`: all adapters' updates in one launch.

A table of addresses and hyper-parameters, one column an update, goes to the device in one copy.
Thread blocks are numbered through all updates; each finds its own among the first ones of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 1024
"""Elements of a thread block: 8 a thread. Larger ones leave memory idle while a block ends."""
_WARPS = 4
_INT_ROWS, _FLOAT_ROWS = 7, 10
_MIN_COLUMNS = 64
"""Tables grow from here in powers of two: few sizes, since each is a compilation."""
_NO_BLOCK = torch.iinfo(torch.int64).max


@triton.jit
def _at(address: tl.tensor, offsets: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    pointer = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + offsets


@triton.jit
def _apply(
    hyper: tl.tensor,
    clip: tl.tensor,
    master: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    inside: tl.tensor | None,
    COLUMNS: tl.constexpr,
) -> None:
    """Updates a block's elements; `inside` None = all of them exist."""
    decay = tl.load(hyper + COLUMNS)
    beta1 = tl.load(hyper + 2 * COLUMNS)
    one_minus_beta1 = tl.load(hyper + 3 * COLUMNS)
    beta2 = tl.load(hyper + 4 * COLUMNS)
    one_minus_beta2 = tl.load(hyper + 5 * COLUMNS)
    step_size = tl.load(hyper + 6 * COLUMNS)
    root_correction2 = tl.load(hyper + 7 * COLUMNS)
    eps = tl.load(hyper + 8 * COLUMNS)
    g = tl.load(grad, mask=inside) * clip
    m = tl.load(exp_avg, mask=inside)
    v = tl.load(exp_avg_sq, mask=inside)
    w = tl.load(master, mask=inside)
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * g * g
    # The approximate root and quotient would be off by 2 units in the last place.
    denominator = tl.div_rn(tl.sqrt_rn(v), root_correction2) + eps
    w = w - decay * w
    w = w - step_size * tl.div_rn(m, denominator)
    tl.store(exp_avg, m, mask=inside)
    tl.store(exp_avg_sq, v, mask=inside)
    tl.store(master, w, mask=inside)


@triton.jit
def _adamw_kernel(
    ints: tl.tensor,  # int64 [_INT_ROWS, COLUMNS]
    floats: tl.tensor,  # fp32 [_FLOAT_ROWS, COLUMNS]
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64)
    first_blocks = tl.load(ints + tl.arange(0, COLUMNS))
    update = tl.sum((first_blocks <= block).to(tl.int32), axis=0) - 1
    ints += update
    hyper = floats + update
    begin = (block - tl.load(ints)) * BLOCK
    numel = tl.load(ints + COLUMNS)
    offsets = begin + tl.arange(0, BLOCK)
    master = _at(tl.load(ints + 2 * COLUMNS), offsets, ALIGNED)
    grad = _at(tl.load(ints + 3 * COLUMNS), offsets, ALIGNED)
    exp_avg = _at(tl.load(ints + 4 * COLUMNS), offsets, ALIGNED)
    exp_avg_sq = _at(tl.load(ints + 5 * COLUMNS), offsets, ALIGNED)
    clip_at = tl.load(ints + 6 * COLUMNS)
    clip = tl.load(hyper)
    if clip_at != 0:
        clip = tl.load(clip_at.to(tl.pointer_type(tl.float32)))
    moves = tl.abs(clip) < float("inf")
    zero = tl.zeros([BLOCK], tl.float32)
    # Two branches, since accesses under a mask of any length are one element wide.
    if begin + BLOCK <= numel:
        if moves:
            _apply(hyper, clip, master, grad, exp_avg, exp_avg_sq, None, COLUMNS)
        tl.store(grad, zero)
    else:
        inside = offsets < numel
        if moves:
            _apply(hyper, clip, master, grad, exp_avg, exp_avg_sq, inside, COLUMNS)
        tl.store(grad, zero, mask=inside)


def launch_adamw(
    places: Sequence[tuple[int, ...]], factors: Sequence[tuple[float, ...]], device: torch.device
) -> None:
    """Launches the kernel for updates of at least one element each.

    Args:
        places: an update's elements, addresses of its master, gradient and moments, and that of its
            clip, 0 where `factors` have it.
        factors: an update's clip and hyper-parameters, in the order of the kernel.
    """
    blocks = [-(-place[0] // _BLOCK) for place in places]
    columns = max(_MIN_COLUMNS, triton.next_power_of_2(len(places)))
    buffer = torch.empty(
        _INT_ROWS + _FLOAT_ROWS // 2,
        columns,
        dtype=torch.int64,
        pin_memory=device.type == "cuda",
    )
    ints = buffer[:_INT_ROWS]
    floats = buffer[_INT_ROWS:].view(torch.float32).view(_FLOAT_ROWS, columns)
    ints[0].fill_(_NO_BLOCK)
    first_blocks = itertools.accumulate(blocks[:-1], initial=0)
    int_rows = [(first, *place) for first, place in zip(first_blocks, places, strict=True)]
    ints[:, : len(places)] = torch.tensor(int_rows, dtype=torch.int64).T
    floats[:9, : len(places)] = torch.tensor(factors, dtype=torch.float32).T
    copy = buffer.to(device, non_blocking=True)
    _adamw_kernel[(sum(blocks),)](
        copy[:_INT_ROWS],
        copy[_INT_ROWS:].view(torch.float32),
        COLUMNS=columns,
        BLOCK=_BLOCK,
        ALIGNED=all(address % 16 == 0 for place in places for address in place[1:5]),
        num_warps=_WARPS,
    )
