"""The CUDA kernels of `csrc/` as functions of tensors.

Tensors are row-major, 16-byte aligned and fp16 or bf16 but where said. Everything runs on the
current stream of the tensors' device. The kernels' own files say what they compute.

Shapes: T rows, K reduction, N output columns, C rank chunks of the micro-batch, R rank columns.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from tlora_megatron.ops.columns import OutputColumns
from tlora_megatron.ops.cuda_arguments import (
    Columns,
    Factors,
    GemmArguments,
    RowsArguments,
    SumsArguments,
)
from tlora_megatron.ops.extension import load_extension
from tlora_megatron.ops.rank_form import RankForm


class Dropout(NamedTuple):
    """What the mask is a function of (`ops.dropout`), beside the column."""

    probability: torch.Tensor
    """fp32 `[slots]`."""
    row_keys: torch.Tensor
    """int32 `[T]`."""
    row_slots: torch.Tensor
    """int32 `[T]`; -1 = no adapter."""
    key: int
    """Of the linear."""
    first_column: int
    """Global index of the first local input feature; a multiple of `dropout.SEED_COLUMNS`."""


class Arenas:
    """Factors of one linear, named once for all launches that read them.

    Args:
        arenas: `[rows, columns]`: one a target, or one that all targets share.
        columns: a target's: which columns of the wide tensor its arena holds; empty = the shared
            arena holds all.
    """

    def __init__(
        self, arenas: tuple[torch.Tensor, ...], columns: tuple[OutputColumns, ...]
    ) -> None:
        self.arenas, self.columns = arenas, columns
        self.argument = Factors()
        for i, arena in enumerate(arenas):
            self.argument.at[i] = arena.data_ptr()
            self.argument.rows[i], self.argument.width[i] = arena.shape
        for i, c in enumerate(columns):
            self.argument.columns[i] = Columns(c.groups, c.stride, c.begin, c.width)


class RankPart(NamedTuple):
    """What a GEMM adds to the base: s and `lora_b`, or dS and `lora_a`."""

    flat: torch.Tensor
    """s or dS."""
    form: RankForm
    factors: Arenas
    num_targets: int
    tile_chunks: torch.Tensor
    """int32 `[row tiles, num_targets + 1]` (`TilePlan.tile_chunks`)."""
    chunk_rows: torch.Tensor
    """int32 `[C]`: first row of each chunk in its arena."""
    dropout: Dropout | None


class GemmTile(NamedTuple):
    """How the GEMM is cut."""

    columns: int
    """Columns of a tile: 128, 192 or 256."""
    group: int = 8
    """Row tiles whose column tiles are computed one after another."""


def gemm(
    x_TK: torch.Tensor,
    weight: torch.Tensor,
    out_TN: torch.Tensor,
    tile: GemmTile,
    *,
    transposed: bool,
    early: bool = False,
    bias_N: torch.Tensor | None = None,
    rank: RankPart | None = None,
) -> None:
    """`out = x W + b + rank part`; W is `[N, K]` if transposed, else `[K, N]`.

    Args:
        early: start before the previous kernel has ended. x, W and everything but the rank part's
            flat tensor must have been written before that kernel began.
    """
    arguments = GemmArguments(
        x=x_TK.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias_N is None else bias_N.data_ptr(),
        out=out_TN.data_ptr(),
        rows=x_TK.shape[0],
        columns_out=out_TN.shape[1],
        depth=x_TK.shape[1],
        half_precision=x_TK.dtype == torch.float16,
        transposed=transposed,
        tile_columns=tile.columns,
        group=tile.group,
        blocks=multiprocessors(x_TK.device) // 2 * 2,
        early=early,
        device=x_TK.device.index,
    )
    if rank is not None:
        _add_rank_part(arguments, rank)
    _launch("gemm", arguments, x_TK.device)


def _add_rank_part(arguments: GemmArguments, rank: RankPart) -> None:
    arguments.ext = rank.flat.data_ptr()
    arguments.ext_rows = rank.form.chunk_rows
    arguments.num_targets = rank.num_targets
    arguments.tile_chunks = rank.tile_chunks.data_ptr()
    arguments.chunk_rows = rank.chunk_rows.data_ptr()
    if rank.dropout is not None:
        arguments.row_slots = rank.dropout.row_slots.data_ptr()
        _add_dropout(arguments, rank.dropout)
    arguments.factors = rank.factors.argument


def rank_rows(
    in_TK: torch.Tensor,
    factors: Arenas,
    flat: torch.Tensor,
    form: RankForm,
    *,
    items: torch.Tensor,
    num_items: int,
    chunks: torch.Tensor,
    scaling: torch.Tensor,
    parts: int,
    dropout: Dropout | None,
    masked: bool,
) -> None:
    """`scaling / (1 - p) mask(in) F^T` into both forms of a flat s or dS (rank_rows.cu).

    Args:
        factors: one arena an item's target.
        items: int32 `[num_items, fields]`, flat (`ops.cuda_row_items`).
        parts: blocks that share the reduction, 1 to 8.
        masked: whether dropout masks `in`, as it does for s; dS has its `1 / (1 - p)` alone.
    """
    arguments = RowsArguments(
        input=in_TK.data_ptr(),
        ext=flat.data_ptr(),
        rows=form.rows_address(flat),
        items=items.data_ptr(),
        chunks=chunks.data_ptr(),
        scaling=scaling.data_ptr(),
        num_rows=in_TK.shape[0],
        in_columns=in_TK.shape[1],
        factors=factors.argument,
        num_targets=len(factors.arenas),
        num_items=num_items,
        item_fields=items.numel() // max(num_items, 1),
        parts=parts,
        row_width=form.row_width,
        half_precision=in_TK.dtype == torch.float16,
        device=in_TK.device.index,
    )
    if dropout is not None and masked:
        _add_dropout(arguments, dropout)
    elif dropout is not None:
        arguments.dropout = dropout.probability.data_ptr()
    _launch("rows", arguments, in_TK.device)


def rank_sums(
    x_TK: torch.Tensor,
    ds: torch.Tensor,
    dy_TN: torch.Tensor,
    s: torch.Tensor,
    form: RankForm,
    *,
    items: torch.Tensor,
    num_items: int,
    blocks: int,
    grad_a: torch.Tensor,
    grad_b: torch.Tensor,
    workspace: torch.Tensor,
    counters: torch.Tensor,
    first_row: int,
    early: bool,
    dropout: Dropout | None,
) -> None:
    """Adds `dS^T mask(x)` and `s^T dy` of every adapter to its gradients (rank_sums.cu).

    Args:
        items: int32 `[num_items, fields]`, flat (`ops.cuda_sum_items`).
        blocks: that run through the items in turn; at most as many as the GPU holds at once.
        grad_a: int64 addresses, one a row of the arena of `lora_a`; 0 beyond a rank.
        grad_b: the same of B, numbered like `grad_a`.
        workspace: fp32, for runs whose sums are added up.
        counters: int32, zero.
        first_row: row of the micro-batch that is row 0 of x.
        early: read dy and s before the previous kernel has ended. They must have been written
            before it began.
    """
    arguments = SumsArguments(
        x=x_TK.data_ptr(),
        ds=form.rows_address(ds),
        dy=dy_TN.data_ptr(),
        s=form.rows_address(s),
        items=items.data_ptr(),
        grad_a=grad_a.data_ptr(),
        grad_b=grad_b.data_ptr(),
        workspace=workspace.data_ptr(),
        counters=counters.data_ptr(),
        num_rows=dy_TN.shape[0],
        x_rows=x_TK.shape[0],
        x_columns=x_TK.shape[1],
        dy_columns=dy_TN.shape[1],
        num_items=num_items,
        blocks=blocks,
        item_fields=items.numel() // max(num_items, 1),
        row_width=form.row_width,
        first_row=first_row,
        early=early,
        half_precision=dy_TN.dtype == torch.float16,
        device=dy_TN.device.index,
    )
    if dropout is not None:
        _add_dropout(arguments, dropout)
    _launch("sums", arguments, dy_TN.device)


def _add_dropout(arguments: ctypes.Structure, dropout: Dropout) -> None:
    arguments.dropout = dropout.probability.data_ptr()
    arguments.row_keys = dropout.row_keys.data_ptr()
    arguments.dropout_key = dropout.key
    arguments.first_column = dropout.first_column


def _launch(name: str, arguments: ctypes.Structure, device: torch.device) -> None:
    # Not `torch.cuda.current_stream`, which makes an object of it: 2 us, twenty times a layer.
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    load_extension().call(name, arguments, stream)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
