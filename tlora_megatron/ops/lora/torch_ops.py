"""The multi-adapter linear in torch: its definition, and one for any device and dtype.

Semantics: `y[t] = W x[t] + b + scaling[s] * B[s] (A[s] drop(x[t]))` with `s` the slot of row t.
Rows of the null slot get the base output only. Runs in any dtype, fp64 in tests, on plain autograd.
A quantised base has other products `W x` and `dy W` (`ops.quantised.weight`), and this branch.

A slot's products run over its own rows and its own rank alone, one GEMM a portion and factor, so
their bits do not depend on the neighbours. `s` and `dS` are flat: for every portion of a slot, a
contiguous block `[rows, R]`, R its rank chunks over all targets.

Shapes: T rows, K features in, N features out, R rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.ops.dropout import dropout
from tlora_megatron.ops.lora.linear_ops import BoundLinear, SiteFactors
from tlora_megatron.ops.lora.rank_places import (
    Elements,
    Places,
    RankPlaces,
    cached_places,
    row_form,
)
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, RankLayout, rank_chunks
from tlora_megatron.ops.routing import RowGroups


class _Part(NamedTuple):
    """One target of a slot."""

    target: int
    columns: slice
    """Columns of the slot's block, whole chunks."""
    b_rows: slice
    """Rows of the target's arena of `lora_b`."""


class _Block(NamedTuple):
    """The rows of one slot's portion and their place in the flat `s` and `dS`."""

    slot: int
    begin: int
    end: int
    offset: int
    a_rows: slice
    """Rows of the arena of `lora_a`: all targets' chunks."""
    parts: tuple[_Part, ...]

    @property
    def width(self) -> int:
        """R."""
        return self.a_rows.stop - self.a_rows.start

    @property
    def stop(self) -> int:
        """End of the block in the flat tensor."""
        return self.offset + (self.end - self.begin) * self.width

    def of(self, flat: Tensor) -> Tensor:
        """The block of a flat tensor, `[rows, R]`."""
        return flat[self.offset : self.stop].view(-1, self.width)


class TorchOps:
    """`LinearOps` as torch's own GEMMs."""

    name = "torch"

    def bind(self, factors: SiteFactors, rows: RowGroups) -> TorchLinear:
        """Returns the linear of these factors over these rows."""
        return TorchLinear(factors, rows)


class TorchLinear(BoundLinear):
    """`BoundLinear` as torch's own GEMMs; see there for what the methods return."""

    __slots__ = ("_blocks",)

    def __init__(self, factors: SiteFactors, rows: RowGroups) -> None:
        super().__init__(factors, rows)
        self._blocks = _blocks(rows, factors.layout)

    def down(self, x_TK: Tensor, window: tuple[int, int] | None = None) -> Tensor:
        first, last = window or (0, self.rows.ends[-1])
        new = x_TK.new_empty if window is None else x_TK.new_zeros
        s = new(_size(self._blocks))
        dropped_TK = self._dropped(x_TK, first)
        for block in self._blocks:
            begin, end = max(block.begin, first), min(block.end, last)
            if end <= begin:
                continue
            s_TR = block.of(s)[begin - block.begin : end - block.begin]
            lora_a_RK = self.factors.lora_a[block.a_rows]
            torch.mm(dropped_TK[begin - first : end - first], lora_a_RK.t(), out=s_TR)
            self._scale(s_TR, block.slot)
        return s

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, s: Tensor) -> Tensor:
        return self._add_up(F.linear(x_TK, weight_NK, bias_N), s)

    def rank_part(self, s: Tensor, bias_N: Tensor | None, num_columns: int) -> Tensor:
        y_TN = s.new_zeros(self.rows.ends[-1], num_columns)
        return self._add_up(y_TN if bias_N is None else y_TN + bias_N, s)

    def up(self, s: Tensor, base_WN: Tensor, window: tuple[int, int]) -> Tensor:
        branch_TN = s.new_zeros(self.rows.ends[-1], base_WN.shape[1])
        self._add_up(branch_TN, s)
        return branch_TN[slice(*window)].to(base_WN.dtype) + base_WN

    def rank_places(self, parts: int = 1) -> RankPlaces:
        """Returns places in the flat s, which is the row form."""
        rows, layout, blocks = self.rows, self.factors.layout, self._blocks

        def build(found: Elements) -> Places:
            return (_size(blocks),), (row_form(rows, layout, found),)

        return cached_places(rows, layout, parts, self.factors.lora_a.device, "torch", build)

    def backward_up(self, dy_TN: Tensor, s: Tensor) -> Tensor:
        """Accumulates dB and returns dS."""
        factors, ds = self.factors, torch.empty_like(s)
        for block in self._blocks:
            s_TR, ds_TR = block.of(s), block.of(ds)
            dy_block_TN = dy_TN[block.begin : block.end]
            for part in block.parts:
                dy_part_TN = factors.columns[part.target].read(dy_block_TN)
                lora_b_RN = factors.lora_b[part.target][part.b_rows]
                torch.mm(dy_part_TN, lora_b_RN.t(), out=ds_TR[:, part.columns])
                grad_RN = factors.grad_b[block.slot][part.target]
                accumulate(grad_RN, s_TR[:, part.columns], dy_part_TN)
            self._scale(ds_TR, block.slot)
        return ds

    def dgrad(self, dy_TN: Tensor, ds: Tensor, weight_NK: Tensor) -> Tensor:
        # The base GEMM adds onto the branch: a pass over [T, K] less than the reverse.
        return self.branch_dgrad(ds, (0, len(dy_TN))).addmm_(dy_TN, weight_NK)

    def branch_dgrad(self, ds: Tensor, window: tuple[int, int]) -> Tensor:
        branch_TK = ds.new_empty(self.rows.ends[-1], self.factors.size_in)
        done = 0
        for block in self._blocks:
            branch_TK[done : block.begin].zero_()
            lora_a_RK = self.factors.lora_a[block.a_rows]
            torch.mm(block.of(ds), lora_a_RK, out=branch_TK[block.begin : block.end])
            done = block.end
        branch_TK[done:].zero_()
        return self._dropped(branch_TK, 0)[slice(*window)]

    def backward_down(
        self,
        x_TK: Tensor,
        dy_TN: Tensor,
        s: Tensor,
        ds: Tensor,
        window: tuple[int, int],
        up: BoundLinear | None = None,
    ) -> None:
        """Accumulates dA; `backward_up` has accumulated dB."""
        first = window[0]
        dropped_TK = self._dropped(x_TK, first)
        for block in self._blocks:
            begin, end = max(block.begin, first), min(block.end, window[1])
            if end <= begin:
                continue
            ds_TR = block.of(ds)[begin - block.begin : end - block.begin]
            for part in block.parts:
                grad_RK = self.factors.grad_a[block.slot][part.target]
                inputs_TK = dropped_TK[begin - first : end - first]
                accumulate(grad_RK, ds_TR[:, part.columns], inputs_TK)

    def _add_up(self, y_TN: Tensor, s: Tensor) -> Tensor:
        """`y += s B^T`, in place."""
        for block in self._blocks:
            s_TR = block.of(s)
            y_block_TN = y_TN[block.begin : block.end]
            for part in block.parts:
                lora_b_RN = self.factors.lora_b[part.target][part.b_rows]
                columns = self.factors.columns[part.target]
                if columns.groups == 1:
                    columns.view(y_block_TN)[:, 0].addmm_(s_TR[:, part.columns], lora_b_RN)
                else:
                    columns.add(y_block_TN, s_TR[:, part.columns] @ lora_b_RN)
        return y_TN

    def _scale(self, s_TR: Tensor, slot: int) -> None:
        # In fp32: a scaling of shape [] would be cast to the dtype of s.
        s_TR.mul_(self.factors.scaling[slot : slot + 1])

    def _dropped(self, x_TK: Tensor, first_row: int) -> Tensor:
        """`drop(x)` of the rows from `first_row` on; its own backward when called on a gradient."""
        factors, rows = self.factors, self.rows
        if not factors.uses_dropout(rows):
            return x_TK
        span = slice(first_row, first_row + x_TK.shape[0])
        keys_T = rows.row_keys(x_TK.device)[span]
        p_T = _row_dropout(factors, rows)[span]
        return dropout(x_TK, keys_T, p_T, factors.dropout_key, factors.first_column)


def _blocks(rows: RowGroups, layout: RankLayout) -> tuple[_Block, ...]:
    """Blocks of the portions with rows and a target here, in row order.

    Made once for all linears that share the layout, which the cache keeps alive with them.
    """

    def build() -> tuple[RankLayout, tuple[_Block, ...]]:
        blocks, offset, end = [], 0, 0
        for slot, length in rows.portions:
            end += length
            if length and slot < rows.num_slots and any(layout.ranks[slot]):
                block = _block(slot, end - length, end, offset, layout)
                blocks.append(block)
                offset = block.stop
        return layout, tuple(blocks)

    return rows.cached(f"torch blocks of {id(layout)}", build)[1]


def _block(slot: int, begin: int, end: int, offset: int, layout: RankLayout) -> _Block:
    first = layout.a_begin[slot][0]
    parts, width = [], 0
    for target, rank in enumerate(layout.ranks[slot]):
        size = RANK_CHUNK * rank_chunks(rank)
        if size:
            b_begin = layout.b_begin[slot][target]
            columns = slice(width, width + size)
            parts.append(_Part(target, columns, slice(b_begin, b_begin + size)))
        width += size
    return _Block(slot, begin, end, offset, slice(first, first + width), tuple(parts))


def _size(blocks: tuple[_Block, ...]) -> int:
    return blocks[-1].stop if blocks else 0


def _row_dropout(factors: SiteFactors, rows: RowGroups) -> Tensor:
    """Dropout probability of each row's adapter, fp32 `[T]`; 0 in the null slot."""
    p_S = factors.dropout

    def build() -> tuple[Tensor, Tensor]:
        return p_S, F.pad(p_S, (0, 1))[rows.row_slots(p_S.device)]

    # The tensor is kept beside the result, so its id is not given to another one.
    return rows.cached(f"row dropout of {id(p_S)}", build)[1]


def accumulate(grad_RN: Tensor | None, s_TR: Tensor, x_TN: Tensor) -> None:
    """Adds `s[:, :rank]^T x` to a gradient, with the sum over rows and the total in fp32."""
    assert grad_RN is not None, "a target with a rank must have a gradient"
    s_RT = s_TR[:, : grad_RN.shape[0]].t()
    if x_TN.dtype != grad_RN.dtype and x_TN.is_cuda:
        grad_RN.add_(torch.mm(s_RT, x_TN, out_dtype=grad_RN.dtype))
    else:
        grad_RN.addmm_(s_RT.to(grad_RN.dtype), x_TN.to(grad_RN.dtype))
