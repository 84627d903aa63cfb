"""The output layer and the loss together, over the rows that predict something and no others.

Logits are computed a run of rows at a time and never kept: their gradient takes their place and is
at once multiplied back to the hidden states, which is exact because a row's gradient is linear in
that of its loss. So backward only scales.

Shapes: T rows of the micro-batch on this rank, n of them with a target, H hidden size, V columns of
this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen.losses import (
    cross_entropy_,
    merge_statistics,
    row_statistics,
    write_gradient_,
)
from tlora_megatron.parallel.collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from tlora_megatron.parallel.groups import ParallelGroups

ROWS_AT_ONCE = 1024
"""Rows of logits that exist at a time: 263 MB of bf16 at 128,256 columns. GEMM tiles of 128 x 256
fill an H100's 132 multiprocessors once at this height (1024 x 4096 outputs of dgrad: 128 tiles)."""


class _Chunk(NamedTuple):
    """Rows of the head that are computed together."""

    begin: int
    end: int
    logits_nV: Tensor
    labels_n: Tensor


class VocabularyShard(NamedTuple):
    """This rank's columns of the logits."""

    tp_group: dist.ProcessGroup
    is_split: bool
    first_column: int


class VocabularyHead:
    """Losses and predictions of a vocabulary-parallel output layer.

    On CPUs and where bits must be exact, every GEMM has the same number of rows whatever the number
    of targets, so that a row's bits do not depend on how many other rows have one.

    Args:
        output_layer: its `weight` is read at every use, so that it may be replaced.
    """

    def __init__(self, output_layer: Any, vocab_size: int, groups: ParallelGroups) -> None:
        self._output_layer = output_layer
        self.tp_group = groups.tp_group
        self.tp_size = groups.layout.tp_size
        self.gathers = groups.layout.sequence_parallel
        columns = len(self.weight_VH)
        self.shard = VocabularyShard(self.tp_group, self.tp_size > 1, groups.tp_rank * columns)
        self.valid = max(0, min(columns, vocab_size - self.shard.first_column))
        self.fills_runs = not self.weight_VH.is_cuda

    @property
    def weight_VH(self) -> Tensor:
        """This rank's rows of the weight."""
        return self._output_layer.weight

    def losses(
        self, hidden: Tensor, rows_n: Tensor, labels_T: Tensor, exactness: Exactness | None = None
    ) -> Tensor:
        """Returns losses of the rows with a target, zero for the others, fp32 `[T]`.

        Layout in: hidden `[T, 1, H]`, or `[T / tp, 1, H]` under sequence parallelism. Layout out:
        the same on every rank. Collectives in forward: an all-gather of hidden under sequence
        parallelism, one of three numbers a row where the vocabulary is split. In backward: an
        all-reduce `[n, H]`, or a reduce-scatter `[T, H]` under sequence parallelism.

        Args:
            rows_n: rows with a target, int64, ascending.
            labels_T: int64.
            exactness: of the micro-batch; None = GEMMs are no higher than it.
        """
        return _HeadLosses.apply(hidden, self, rows_n, labels_T, exactness)

    def score(
        self, hidden: Tensor, rows_n: Tensor, labels_T: Tensor, exactness: Exactness | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns losses, and if the label is the first choice, bool `[T]`; no gradients."""
        hidden_TH = self.gathered(hidden)
        losses_T = torch.zeros_like(labels_T, dtype=torch.float32)
        right_T = torch.zeros_like(labels_T, dtype=torch.bool)
        for chunk in self.chunks(hidden_TH, rows_n, labels_T, exactness):
            rows, size = rows_n[chunk.begin : chunk.end], chunk.end - chunk.begin
            first_n = vocab_parallel_argmax(chunk.logits_nV[:, : self.valid], self.shard)
            right_T[rows] = (first_n == chunk.labels_n)[:size]
            losses_T[rows] = self.chunk_losses(chunk, gradient=False)[:size]
        return losses_T, right_T

    def gathered(self, hidden: Tensor) -> Tensor:
        """Returns all rows of the hidden states, `[T, H]`."""
        hidden_TH = hidden.flatten(0, -2)
        return all_gather_rows(hidden_TH, self.tp_group) if self.gathers else hidden_TH

    def chunks(
        self, hidden_TH: Tensor, rows_n: Tensor, labels_T: Tensor, exactness: Exactness | None
    ) -> Iterator[_Chunk]:
        """Yields logits of the rows with a target, run by run in the same memory.

        Runs are filled with zeros to one height where a row's bits must not depend on others: for
        all micro-batches with `exactness`, since cuBLAS divides the sum over the vocabulary by the
        height; within one on CPUs (`fills_runs`).
        """
        height = exactness.head_rows if exactness else min(ROWS_AT_ONCE, len(hidden_TH))
        fills = exactness is not None or self.fills_runs
        hidden_nH = hidden_TH.new_empty(height, hidden_TH.shape[1])
        logits_nV = hidden_TH.new_empty(height, len(self.weight_VH))
        labels_n = labels_T.new_empty(height)
        for begin in range(0, len(rows_n), height):
            end = min(begin + height, len(rows_n))
            rows, size = rows_n[begin:end], end - begin
            torch.index_select(hidden_TH, 0, rows, out=hidden_nH[:size])
            torch.index_select(labels_T, 0, rows, out=labels_n[:size])
            labels_n[:size] -= self.shard.first_column
            if fills:
                hidden_nH[size:] = 0
                labels_n[size:] = -1
                size = height
            torch.mm(hidden_nH[:size], self.weight_VH.t(), out=logits_nV[:size])
            yield _Chunk(begin, end, logits_nV[:size], labels_n[:size])

    def chunk_losses(self, chunk: _Chunk, *, gradient: bool) -> Tensor:
        """Returns losses of a run's rows, fp32 `[rows]`; may write gradients over the logits."""
        logits_nV, labels_n = chunk.logits_nV, chunk.labels_n
        if not self.shard.is_split:
            return cross_entropy_(logits_nV, labels_n, self.valid, gradient=gradient)
        parts_3n = row_statistics(logits_nV, labels_n, self.valid)
        all_parts = all_gather_rows(parts_3n, self.tp_group).view(self.tp_size, *parts_3n.shape)
        losses_n, lse_n = merge_statistics(all_parts)
        if gradient:
            write_gradient_(logits_nV, labels_n, lse_n, self.valid)
        return losses_n


class _HeadLosses(torch.autograd.Function):
    """Saves the gradients `[n, H]` of each row's own loss; backward scales and spreads them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: VocabularyHead,
        rows_n: Tensor,
        labels_T: Tensor,
        exactness: Exactness | None,
    ) -> Tensor:
        hidden_TH = head.gathered(hidden)
        losses_T = torch.zeros_like(labels_T, dtype=torch.float32)
        gradient, count = ctx.needs_input_grad[0], len(rows_n)
        spare = exactness.head_rows if exactness else ROWS_AT_ONCE
        grads_nH = hidden_TH.new_empty(count + spare if gradient else 0, hidden_TH.shape[1])
        for chunk in head.chunks(hidden_TH, rows_n, labels_T, exactness):
            losses_n = head.chunk_losses(chunk, gradient=gradient)
            losses_T[rows_n[chunk.begin : chunk.end]] = losses_n[: chunk.end - chunk.begin]
            if gradient:
                out = grads_nH[chunk.begin : chunk.begin + len(chunk.logits_nV)]
                torch.mm(chunk.logits_nV, head.weight_VH, out=out)
        ctx.save_for_backward(grads_nH[:count], rows_n)
        ctx.head, ctx.shape = head, hidden.shape
        return losses_T

    @staticmethod
    def backward(ctx: Any, dlosses_T: Tensor) -> tuple[Tensor | None, ...]:
        grads_nH, rows_n = ctx.saved_tensors
        head: VocabularyHead = ctx.head
        scaled_nH = torch.empty_like(grads_nH)
        torch.mul(grads_nH, dlosses_T[rows_n][:, None], out=scaled_nH)
        if head.shard.is_split and not head.gathers:
            scaled_nH = all_reduce(scaled_nH, head.tp_group).wait()
        dhidden_TH = scaled_nH.new_zeros(len(dlosses_T), scaled_nH.shape[1])
        dhidden_TH[rows_n] = scaled_nH
        if head.gathers:
            dhidden_TH = reduce_scatter_rows(dhidden_TH, head.tp_group).wait()
        return dhidden_TH.view(ctx.shape), None, None, None, None


def vocab_parallel_argmax(logits_nV: Tensor, shard: VocabularyShard) -> Tensor:
    """Returns the column of every row's largest logit, in this rank's numbering, int64 `[n]`.

    The smallest token on a tie; a token of another rank is a column outside of this one's.
    Collectives: two all-reduces of `[n]`.
    """
    none = torch.iinfo(torch.int64).max
    if logits_nV.shape[1]:
        best_n, index_n = logits_nV.max(dim=-1)
    else:
        best_n = logits_nV.new_full((len(logits_nV),), -torch.inf)
        index_n = torch.full_like(best_n, none, dtype=torch.int64)
    if not shard.is_split:
        return index_n
    best_n = best_n.float()
    top_n = best_n.clone()
    dist.all_reduce(top_n, op=dist.ReduceOp.MAX, group=shard.tp_group)
    index_n = torch.where(best_n == top_n, index_n + shard.first_column, none)
    dist.all_reduce(index_n, op=dist.ReduceOp.MIN, group=shard.tp_group)
    return index_n - shard.first_column
