"""Keeps what is not finite in one document from its neighbours under FlashAttention-4.

A tile of its kernels reads up to 127 rows behind a document's last one. Masks multiply them by
zero, which leaves a NaN a NaN: a job whose values overflow would harm the next one. So the first
128 rows of every document are searched before each call. What is not finite there, or so large that
products of it would not be, becomes zero, and the document is marked. All rows of marked documents
are set to NaN behind the call, so that their own job sees what it would have seen alone.

The search reads 128 rows a document, each way; nothing waits for its result on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora_megatron.ops.warm_kernel import WarmKernel

_REACH = tl.constexpr(128)
"""Rows behind a document that tiles may read: none of them is larger in either direction."""
_LARGEST = tl.constexpr(2.0**56)
"""The sum of 128 products of two such values is finite in fp32."""
_BLOCK_ROWS = tl.constexpr(8)
_BLOCK_COLUMNS = tl.constexpr(512)


class Guard(NamedTuple):
    """The documents of one call, and which of them are marked."""

    begins: tuple[Tensor, Tensor]
    """Of the documents' query and key rows, and the end of the last; int32 `[documents + 1]`."""
    marks: Tensor
    """int32 `[documents + 1]`; the last one stands for rows behind all documents."""

    def search(self, queries: Tensor, *keys: Tensor) -> None:
        """Marks documents, and sets what must not be read to zero in place.

        Args:
            queries: `[T, N, D]`, by documents' query rows; head dimensions without gaps.
            keys: none, or two tensors `[K, G, D]`.
        """
        first, second = keys or (queries, queries)
        rows = (len(queries), len(first))
        strides = [x.stride(dim) for x in (queries, first, second) for dim in (0, 1)]
        heads = (queries.shape[1], first.shape[1])
        _search.launch(
            len(self.marks),
            (queries, first, second, *self.begins, self.marks),
            (*rows, *strides, *heads, len(self.marks) - 1),
            (queries.shape[2],),
            num_warps=4,
            grid_y=_REACH.value // _BLOCK_ROWS.value * (3 if keys else 1),
        )

    def tell(self, queries: Tensor, *keys: Tensor) -> None:
        """Sets the rows of marked documents to NaN in place; tensors as for `search`."""
        first, second = keys or (queries, queries)
        strides = [x.stride(dim) for x in (queries, first, second) for dim in (0, 1)]
        heads = (queries.shape[1], first.shape[1])
        _tell.launch(
            len(self.marks) - 1,
            (queries, first, second, *self.begins, self.marks),
            (*strides, *heads),
            (queries.shape[2],),
            num_warps=4,
            grid_y=3 if keys else 1,
        )


def guard_inputs(
    q_TND: Tensor, k_KGD: Tensor, v_KGD: Tensor, begins: tuple[Tensor, Tensor]
) -> tuple[Guard, Tensor, Tensor, Tensor]:
    """Returns a guard, and the inputs of the call that it is to stand before; differentiable."""
    guard = Guard(begins, torch.zeros_like(begins[0]))
    return guard, *_Inputs.apply(_whole_heads(q_TND), *map(_whole_heads, (k_KGD, v_KGD)), guard)


def guard_output(guard: Guard, out_TND: Tensor) -> Tensor:
    """Returns the call's output behind its guard; differentiable."""
    return _Output.apply(out_TND, guard)


def _whole_heads(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, guard: Guard) -> tuple[Tensor, ...]:
        guard.search(q, k, v)
        ctx.guard = guard
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        ctx.guard.tell(dq, dk, dv)
        return dq, dk, dv, None


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, guard: Guard) -> Tensor:
        guard.tell(out)
        ctx.guard = guard
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        dout = _whole_heads(dout)
        ctx.guard.search(dout)
        return dout, None


_SEARCH_NUMBERS = (
    *("query_rows", "key_rows", "q_row", "q_head", "k_row", "k_head", "v_row", "v_head"),
    *("num_heads", "num_groups", "num_documents"),
)
_TELL_NUMBERS = ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "num_heads", "num_groups")


@triton.jit
def _search_rows(
    x: tl.tensor,  # [num_rows, num_heads, HEAD]
    begins: tl.tensor,  # int32 [num_documents + 1]
    marks: tl.tensor,  # int32 [num_documents + 1]
    num_rows: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    num_heads: tl.tensor,
    num_documents: tl.tensor,
    chunk: tl.tensor,
    HEAD: tl.constexpr,
) -> None:
    document = tl.program_id(0)
    begin = tl.load(begins + document)
    end = tl.load(begins + tl.minimum(document + 1, num_documents))
    end = tl.where(document == num_documents, num_rows, end)
    end = tl.minimum(end, begin + _REACH)
    first = begin + chunk * _BLOCK_ROWS
    if first < end:
        rows = first + tl.arange(0, _BLOCK_ROWS)
        found = 0
        for column in range(0, num_heads * HEAD, _BLOCK_COLUMNS):
            columns = column + tl.arange(0, _BLOCK_COLUMNS)
            inside = (rows < end)[:, None] & (columns < num_heads * HEAD)[None, :]
            offsets = columns // HEAD * head_stride + columns % HEAD
            places = x + rows[:, None].to(tl.int64) * row_stride + offsets[None, :]
            value = tl.load(places, mask=inside, other=0.0).to(tl.float32)
            is_ill = (tl.abs(value) <= _LARGEST) == 0  # a NaN is not less than anything
            tl.store(places, tl.zeros_like(value), mask=inside & is_ill)
            found += tl.sum(tl.sum(is_ill.to(tl.int32), 1), 0)
        if found > 0:
            tl.store(marks + document, 1)


@triton.jit(do_not_specialize=_SEARCH_NUMBERS)
def _search_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    query_begins: tl.tensor,
    key_begins: tl.tensor,
    marks: tl.tensor,
    query_rows: tl.tensor,
    key_rows: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    num_heads: tl.tensor,
    num_groups: tl.tensor,
    num_documents: tl.tensor,
    HEAD: tl.constexpr,
) -> None:
    chunks: tl.constexpr = _REACH // _BLOCK_ROWS
    part, chunk = tl.program_id(1) // chunks, tl.program_id(1) % chunks
    if part == 0:
        _search_rows(
            *(q, query_begins, marks, query_rows, q_row, q_head, num_heads),
            *(num_documents, chunk, HEAD),
        )
    elif part == 1:
        _search_rows(
            *(k, key_begins, marks, key_rows, k_row, k_head, num_groups),
            *(num_documents, chunk, HEAD),
        )
    else:
        _search_rows(
            *(v, key_begins, marks, key_rows, v_row, v_head, num_groups),
            *(num_documents, chunk, HEAD),
        )


@triton.jit
def _tell_rows(
    x: tl.tensor,
    begins: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    num_heads: tl.tensor,
    HEAD: tl.constexpr,
) -> None:
    document = tl.program_id(0)
    for row in range(tl.load(begins + document), tl.load(begins + document + 1)):
        for column in range(0, num_heads * HEAD, _BLOCK_COLUMNS):
            columns = column + tl.arange(0, _BLOCK_COLUMNS)
            offsets = columns // HEAD * head_stride + columns % HEAD
            value = tl.full((_BLOCK_COLUMNS,), float("nan"), tl.float32)
            places = x + tl.cast(row, tl.int64) * row_stride + offsets
            tl.store(places, value, mask=columns < num_heads * HEAD)


@triton.jit(do_not_specialize=_TELL_NUMBERS)
def _tell_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    query_begins: tl.tensor,
    key_begins: tl.tensor,
    marks: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    num_heads: tl.tensor,
    num_groups: tl.tensor,
    HEAD: tl.constexpr,
) -> None:
    if tl.load(marks + tl.program_id(0)) != 0:
        part = tl.program_id(1)
        if part == 0:
            _tell_rows(q, query_begins, q_row, q_head, num_heads, HEAD)
        elif part == 1:
            _tell_rows(k, key_begins, k_row, k_head, num_groups, HEAD)
        else:
            _tell_rows(v, key_begins, v_row, v_head, num_groups, HEAD)


_search, _tell = WarmKernel(_search_kernel), WarmKernel(_tell_kernel)
