"""Casts master weights of experts' factors into the arenas that kernels read, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.warm_kernel import WarmKernel

_FIELDS = 7
_BLOCK = 1024


class CastFactor(NamedTuple):
    """A factor of all experts: where its master weights begin, and its place in an arena."""

    begin: int
    arena_LRN: Tensor


@triton.jit(do_not_specialize=["largest"])
def _cast_kernel(
    master: tl.tensor,  # fp32
    factors: tl.tensor,  # int64 [F, FIELDS]
    like: tl.tensor,  # its dtype is the arenas'
    defect: tl.tensor,  # fp32 [1]
    largest: tl.tensor,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    fields = factors + tl.program_id(1) * FIELDS
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(fields):
        rank = tl.load(fields + 1)
        width = tl.load(fields + 2)
        source = master + tl.load(fields + 3) + row * width
        address = tl.load(fields + 4) + row // rank * tl.load(fields + 5)
        address += row % rank * tl.load(fields + 6)
        to = address.to(tl.pointer_type(like.dtype.element_ty))
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < width
            value = tl.load(source + columns, mask=inside, other=0.0)
            value = value.to(like.dtype.element_ty).to(tl.float32)
            is_nan = value != value
            is_large = tl.abs(value) > largest
            value = tl.where(is_large, tl.where(value > 0, largest, -largest), value)
            value = tl.where(is_nan, 0.0, value)
            tl.store(to + columns, value.to(like.dtype.element_ty), mask=inside)
            if tl.sum((is_nan | is_large).to(tl.int32), 0) > 0:
                tl.store(defect, float("nan"))


_cast = WarmKernel(_cast_kernel)


class FactorCaster:
    """Writes one adapter's factors on routed experts into the arenas.

    Args:
        factors: all in the compute dtype, on one device.
    """

    def __init__(self, factors: Sequence[CastFactor]) -> None:
        rows = []
        for begin, arena in factors:
            experts, rank, width = arena.shape
            assert arena.stride(2) == 1, "a rank row lies in one piece"
            size = arena.element_size()
            steps = (arena.stride(0) * size, arena.stride(1) * size)
            rows.append((experts * rank, rank, width, begin, arena.data_ptr(), *steps))
        self._like = factors[0].arena_LRN
        self._most = max(row[0] for row in rows)
        self._table = torch.tensor(rows, dtype=torch.int64).to(self._like.device)
        self._count = len(rows)

    def write(self, master_N: Tensor) -> Tensor:
        """Writes master weights, rounded; returns fp32 `[]`: 0, or NaN where one is not finite.

        What is not finite never reaches an arena: a NaN becomes 0, the rest the largest number.
        """
        defect = master_N.new_zeros(1)
        _cast.launch(
            self._most,
            (master_N, self._table, self._like, defect),
            (torch.finfo(self._like.dtype).max,),
            (_FIELDS, _BLOCK),
            num_warps=4,
            grid_y=self._count,
        )
        return defect[0]
