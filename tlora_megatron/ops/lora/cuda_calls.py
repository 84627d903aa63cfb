"""The CUDA kernels of `csrc/` as functions of tensors, and the layout of s and dS for them.

Tensors are row-major, 16-byte aligned and bf16 but where said. Everything runs on the
current stream of the tensors' device. The kernels' own files say what they compute.

Shapes: T rows, K reduction, N output columns, C rank chunks of the micro-batch, R rank columns.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.ops.kernel_build import load_extension
from tlora_megatron.ops.lora.cuda_arguments import (
    Arenas,
    GemmArguments,
    GemmTile,
    RowsArguments,
    SumsArguments,
    packer,
)
from tlora_megatron.ops.lora.linear_ops import SiteTables
from tlora_megatron.ops.lora.rank_places import Elements, Places, chunk_form, first_rows
from tlora_megatron.ops.lora.tiling import ITEM_FIELDS, RANK_CHUNK, ROW_TILE, PlanTensors, WorkItems
from tlora_megatron.ops.routing import RowGroups


class RankForm(NamedTuple):
    """Sizes of a flat s or dS, which holds every value twice: in chunks, then in rows.

    The GEMM reads the transposed chunks, `[chunk_rows, 256]`; the sums over rows read the rows,
    `[num_rows, row_width]`.

    Launches take addresses: views would cost the host as much as the launch.
    """

    chunk_rows: int
    num_rows: int
    row_width: int

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return self.chunk_rows * ROW_TILE + self.num_rows * self.row_width

    def rows_address(self, flat: Tensor) -> int:
        """Address of the first row."""
        return flat.data_ptr() + self.chunk_rows * ROW_TILE * flat.element_size()


def form_places(rows: RowGroups, plan: PlanTensors, found: Elements) -> Places:
    """Returns the places in a flat s or dS: among its rows and in its chunks."""
    form = rank_form(plan)
    row = first_rows(rows, plan.layout, plan.device)[found.slot] + found.row
    in_rows = form.chunk_rows * ROW_TILE + row * form.row_width + found.place
    return (form.numel,), (in_rows, chunk_form(rows, plan, found))


def rank_form(plan: PlanTensors) -> RankForm:
    """Returns the form of a plan's s and dS: rows of the most chunks of any slot, in 64s."""
    row_width = max(64, -(-plan.most_chunks * RANK_CHUNK // 64) * 64)
    return RankForm(plan.num_chunks * RANK_CHUNK, plan.num_rows, row_width)


class Dropout(NamedTuple):
    """The arguments of the dropout mask besides the column (`ops.dropout`)."""

    probability: Tensor
    """fp32 `[slots]`."""
    row_keys: Tensor
    """int32 `[T]`."""
    row_slots: Tensor
    """int32 `[T]`; -1 = no adapter."""
    key: int
    """The linear's key."""
    first_column: int
    """Global index of the first local input feature; a multiple of `dropout.SEED_COLUMNS`."""


_GEMM, _ROWS, _SUMS = map(packer, (GemmArguments, RowsArguments, SumsArguments))


class RankPart(NamedTuple):
    """The product that a GEMM adds to the base: s with `lora_b`, or dS with `lora_a`."""

    flat: Tensor
    """s or dS."""
    form: RankForm
    factors: Arenas
    num_targets: int
    tile_chunks: Tensor
    """int32 `[row tiles, num_targets + 1]` (`TilePlan.tile_chunks`)."""
    chunk_rows: Tensor
    """int32 `[C]`: first row of each chunk in its arena."""
    dropout: Dropout | None


def gemm(
    x_TK: Tensor,
    weight: Tensor,
    out_TN: Tensor,
    tile: GemmTile,
    *,
    transposed: bool,
    overlaps_previous_kernel: bool = False,
    bias_N: Tensor | None = None,
    rank: RankPart | None = None,
) -> None:
    """`out = x W + b + rank part`; W is `[N, K]` if transposed, else `[K, N]`.

    Args:
        overlaps_previous_kernel: start before the previous kernel has ended. x, W and everything
            but the rank part's flat tensor must have been written before that kernel began.
    """
    arguments = gemm_arguments(
        x_TK, weight, out_TN, tile, transposed, overlaps_previous_kernel, bias_N, rank
    )
    launch("gemm", arguments, x_TK)


def gemm_arguments(
    x_TK: Tensor,
    weight: Tensor,
    out_TN: Tensor,
    tile: GemmTile,
    transposed: bool,
    overlaps_previous_kernel: bool,
    bias_N: Tensor | None,
    rank: RankPart | None,
) -> bytes:
    """Returns the struct of a GEMM, of bf16 or of codes; see `gemm`."""
    flat = tile_chunks = chunk_rows = ext_rows = num_targets = 0
    factors, dropout = b"", None
    if rank is not None:
        flat, ext_rows, num_targets = rank.flat.data_ptr(), rank.form.chunk_rows, rank.num_targets
        tile_chunks, chunk_rows = rank.tile_chunks.data_ptr(), rank.chunk_rows.data_ptr()
        factors, dropout = rank.factors.argument, rank.dropout
    row_keys, row_slots, probability, key, first_column = mask_fields(dropout)
    return _GEMM.pack(  # in the order of `GemmArguments`
        x_TK.data_ptr(), weight.data_ptr(), 0 if bias_N is None else bias_N.data_ptr(), flat,
        out_TN.data_ptr(), tile_chunks, chunk_rows, row_keys, row_slots, probability, x_TK.shape[0],
        out_TN.shape[1], x_TK.shape[1], ext_rows, factors, num_targets, key, first_column,
        transposed, tile.columns, tile.group, multiprocessors(x_TK.device) // 2 * 2,
        overlaps_previous_kernel, device_index(x_TK),
    )  # fmt: skip


def rank_rows(
    in_TK: Tensor,
    factors: Arenas,
    flat: Tensor,
    form: RankForm,
    work: WorkItems,
    *,
    chunks: Tensor,
    scaling: Tensor,
    parts: int,
    dropout: Dropout | None,
    masked: bool,
    first_row: int = 0,
) -> None:
    """`scaling / (1 - p) mask(in) F^T` into both forms of a flat s or dS (rank_rows.cu).

    Args:
        factors: one arena an item's target.
        work: items of `work_items.row_items`.
        chunks: the plan's table of this name.
        parts: blocks that share the reduction, 1 to 8.
        masked: whether dropout masks `in`, as it does for s; dS has its `1 / (1 - p)` alone.
        first_row: the row of the micro-batch that `in` begins with.
    """
    row_keys, _, probability, key, first_column = mask_fields(dropout)
    if not masked:
        row_keys = key = first_column = 0
    arguments = _ROWS.pack(  # in the order of `RowsArguments`
        in_TK.data_ptr(), flat.data_ptr(), form.rows_address(flat), work.items.data_ptr(),
        chunks.data_ptr(), row_keys, scaling.data_ptr(), probability, in_TK.shape[0],
        in_TK.shape[1], factors.argument, len(factors.arenas), work.count, ITEM_FIELDS, parts,
        form.row_width, first_row, key, first_column, device_index(in_TK),
    )  # fmt: skip
    launch("rows", arguments, in_TK)


class SumOperands(NamedTuple):
    """The tensors that rank_sums.cu sums over rows."""

    x_TK: Tensor
    """The rows of the micro-batch from `first_row` on."""
    first_row: int
    ds: Tensor
    """dS, flat."""
    dy_TN: Tensor
    """All rows of the micro-batch."""
    s: Tensor
    """s, flat."""


def rank_sums(
    operands: SumOperands,
    form: RankForm,
    work: WorkItems,
    tables: SiteTables,
    *,
    blocks: int,
    overlaps_previous_kernel: bool,
    dropout: Dropout | None,
) -> None:
    """Adds `dS^T mask(x)` and `s^T dy` of every adapter to its gradients (rank_sums.cu).

    Args:
        form: of s and of dS.
        work: items of `work_items.sum_items`.
        tables: addresses of the gradients.
        blocks: that run through the items in turn; at most as many as the GPU holds at once.
        overlaps_previous_kernel: read dy and s before the previous kernel has ended. They must have
            been written before it began.
    """
    x_TK, first_row, ds, dy_TN, s = operands
    row_keys, _, probability, key, first_column = mask_fields(dropout)
    arguments = _SUMS.pack(  # in the order of `SumsArguments`
        x_TK.data_ptr(), form.rows_address(ds), dy_TN.data_ptr(), form.rows_address(s),
        work.items.data_ptr(), work.borders.data_ptr(), tables.grad_a.data_ptr(),
        tables.grad_b.data_ptr(), work.partial_sums.data_ptr(), work.counters.data_ptr(), row_keys,
        probability, dy_TN.shape[0], x_TK.shape[0], x_TK.shape[1], dy_TN.shape[1], work.count,
        ITEM_FIELDS, blocks, form.row_width, first_row, key, first_column, overlaps_previous_kernel,
        device_index(dy_TN),
    )  # fmt: skip
    launch("sums", arguments, dy_TN)


def mask_fields(dropout: Dropout | None) -> tuple[int, int, int, int, int]:
    """Returns `Dropout` as the structs hold it: addresses, 0 = null."""
    if dropout is None:
        return 0, 0, 0, 0, 0
    probability, row_keys, row_slots, key, first_column = dropout
    return row_keys.data_ptr(), row_slots.data_ptr(), probability.data_ptr(), key, first_column


def launch(name: str, arguments: bytes, on: Tensor) -> None:
    """Launches a kernel of the library on the current stream of a tensor's GPU."""
    # Not `torch.cuda.current_stream`, which makes an object of it: 2 us, twenty times a layer.
    stream = torch._C._cuda_getCurrentRawStream(device_index(on))
    load_extension().call(name, arguments, stream)


def device_index(x: Tensor) -> int:
    """Index of the GPU that holds a tensor."""
    index = x.device.index
    assert index is not None, "these kernels take tensors on a GPU"
    return index


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
