"""The Triton kernel that equals `rank_places.gather_or_zero`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlora_megatron.ops.warm_kernel import WarmKernel

_BLOCK = 1024
"""Values of a thread block, 8 a thread."""
_WARPS = 4


@triton.jit(do_not_specialize=["count"])
def _gather_kernel(
    values: tl.tensor,
    places: tl.tensor,  # int32 [count]
    out: tl.tensor,  # [count]
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + at, mask=at < count, other=0)
    found = tl.load(values + (place - 1), mask=place > 0, other=0.0)
    tl.store(out + at, found, mask=at < count)


_gather = WarmKernel(_gather_kernel)


def gather(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns `values[places - 1]`, 0 where a place is 0.

    Args:
        values: contiguous, read as a flat tensor.
        places: int32 `[n]`.
    """
    count = places.numel()
    out = values.new_empty(count)
    _gather.launch(
        -(-count // _BLOCK), (values, places, out), (count,), (_BLOCK,), num_warps=_WARPS
    )
    return out
