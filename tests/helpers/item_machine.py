"""The CUDA kernels on the CPU: what work items, chunk tables and arena rows tell them to do.

Stands in for the functions of `ops.lora.cuda_calls`, block by block: reads in boxes of 64 columns
with zeros outside a tensor, passes over at most 128 rank rows of which those not asked for hold
anything, zeros for rows of other adapters, parts of sums through the workspace in any order of
arrival. Buffers come poisoned with NaN; what is written twice is refused.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from tlora_megatron.ops.dropout import dropout_reference
from tlora_megatron.ops.lora.cuda_arguments import Arenas, GemmTile
from tlora_megatron.ops.lora.cuda_calls import Dropout, RankForm, RankPart, SumOperands
from tlora_megatron.ops.lora.linear_ops import OutputColumns, SiteFactors, SiteTables
from tlora_megatron.ops.lora.tiling import ITEM_FIELDS, WorkItems

BLOCK_ROWS = 128
CHUNK = 16
PANEL = 64
TILE_ROWS = 256
UNIT = 256
Array = np.ndarray[Any, np.dtype[np.float64]]


def kernel_width(chunks: int) -> int:
    """Rank columns that a kernel computes for so many chunks."""
    assert 1 <= chunks <= 8, f"an item must have 1 to 8 chunks, got {chunks}"
    return next(width for width in (16, 32, 64, 128) if width >= CHUNK * chunks)


def box(matrix: Array, row: int, column: int, rows: int) -> Array:
    """A copy of `[rows, 64]`, zero outside the matrix: a bulk tensor copy."""
    assert column >= 0, f"a box must begin in the matrix or beyond, got column {column}"
    found = np.zeros((rows, PANEL), dtype=matrix.dtype)
    before = max(-row, 0)
    inside = matrix[row + before : max(row + rows, 0), column : column + PANEL]
    found[before : before + inside.shape[0], : inside.shape[1]] = inside
    return found


def keep_mask(dropout: Dropout, first_row: int, num_rows: int, columns: int) -> np.ndarray:
    """bool `[num_rows, columns]`: what stays of the rows from `first_row` on."""
    mine = slice(first_row, first_row + num_rows)
    slots = dropout.row_slots[mine]
    p_T = torch.where(slots < 0, 0.0, dropout.probability[slots.clamp(min=0)])
    args = dropout.row_keys[mine], p_T, dropout.key, dropout.first_column
    return (dropout_reference(torch.ones(len(slots), columns), *args) != 0).numpy()


def drop(values: Array, dropout: Dropout | None, first_row: int = 0) -> Array:
    if dropout is None:
        return values
    return np.where(keep_mask(dropout, first_row, *values.shape), values, 0.0)


def output_column(c: OutputColumns, place: int) -> int:
    return place // c.width * c.stride + c.begin + place % c.width


def compact_column(c: OutputColumns, column: int) -> int:
    inside = column % c.stride - c.begin
    owned = 0 <= inside < c.width
    return column // c.stride * c.width + inside if owned else c.groups * c.width


def chunks_of(form: RankForm, flat: torch.Tensor) -> np.ndarray:
    """A view `[chunk_rows, 256]` of a flat s or dS."""
    return flat[: form.chunk_rows * TILE_ROWS].view(form.chunk_rows, TILE_ROWS).numpy()


def rows_of(form: RankForm, flat: torch.Tensor) -> np.ndarray:
    """A view `[num_rows, row_width]` of a flat s or dS."""
    return flat[form.chunk_rows * TILE_ROWS :].view(form.num_rows, form.row_width).numpy()


def write_once(to: Array, values: Array) -> None:
    """Writes over poison, or over the zeros that rows outside of a window keep.

    Raises:
        AssertionError: if anything was written there before.
    """
    assert np.isnan(to).all() or not to.any(), "a place must be written once"
    to[...] = values


def item_table(items: torch.Tensor, num_items: int) -> np.ndarray:
    """The launched items that say something, `[items, ITEM_FIELDS]`.

    Raises:
        AssertionError: if an item comes after the end, where a block may have left.
    """
    assert num_items > 0, "a grid must have blocks"
    table = items.numpy().reshape(-1, ITEM_FIELDS)[:num_items]
    live = table[:, 0] >= 0
    assert (np.diff(live.astype(int)) <= 0).all(), "items must come before the end of their list"
    return table[live]


def targets_of(rank: RankPart, begin: int, end: int) -> tuple[int, int]:
    """The range of targets that write columns `begin:end`, as lora_gemm.cu finds it."""
    if not rank.factors.columns:
        return 0, rank.num_targets
    touched = [
        i
        for i, c in enumerate(rank.factors.columns)
        if any(0 <= n % c.stride - c.begin < c.width for n in range(begin, end, PANEL))
    ]
    return (touched[0], touched[-1] + 1) if touched else (0, 0)


class ItemMachine:
    """Executes launches of one linear's kernels.

    Args:
        factors: of the linear: the gradients that addresses may name.
        tile: the tile of every GEMM.
        seed: of the order in which blocks of sums arrive.
        multiprocessors: of the GPU that the callers see.
    """

    def __init__(
        self, factors: SiteFactors, *, tile: int = 256, seed: int = 0, multiprocessors: int = 8
    ) -> None:
        self.tile = GemmTile(tile)
        self.tile_sizes: list[tuple[int, int]] = []
        """Rows and columns that tiles were chosen for."""
        self.launches: list[str] = []
        self.masked_gemms: list[bool] = []
        """True for each GEMM that got the arguments of dropout."""
        self._multiprocessors = multiprocessors
        self._random = np.random.default_rng(seed)
        grads = [g for table in (factors.grad_a, factors.grad_b) for slot in table for g in slot]
        self._gradient_rows = {
            row.data_ptr(): row.numpy() for g in grads if g is not None for row in g
        }

    def multiprocessors(self, device: torch.device) -> int:
        """Stands in for `cuda.calls.multiprocessors`."""
        return self._multiprocessors

    def gemm_tile(self, row_budget: int, columns: int, clusters: int) -> GemmTile:
        self.tile_sizes.append((row_budget, columns))
        return self.tile

    def rank_rows(
        self, in_TK: torch.Tensor, factors: Arenas, flat: torch.Tensor, form: RankForm,
        work: WorkItems, *, chunks: torch.Tensor, scaling: torch.Tensor, parts: int,
        dropout: Dropout | None, masked: bool, first_row: int = 0,
    ) -> None:  # fmt: skip
        """rank_rows.cu."""
        self.launches.append("rows")
        assert parts in (1, 2, 4, 8), f"a cluster must have 1 to 8 blocks, got {parts}"
        out, rows = chunks_of(form, flat), rows_of(form, flat)
        values = drop(in_TK.numpy(), dropout if masked else None, first_row)
        for item in item_table(work.items, work.count):
            row, begin, end, tile_column, target, slot, count, factor_row, first, rank = item[:10]
            factor = factors.arenas[target].numpy()
            sums = np.zeros((BLOCK_ROWS, kernel_width(count)))
            if begin < row + BLOCK_ROWS and end > row:
                c = factors.columns[target] if factors.columns else None
                args = (values, row - first_row, factor, factor_row, count, c)
                sums = sum(self._rank_part(*args, part, parts) for part in range(parts))
            t = row + np.arange(BLOCK_ROWS)
            inside = (t >= begin) & (t < end)
            p = 0.0 if dropout is None else float(dropout.probability[slot])
            wanted = sums[:, : count * CHUNK] * float(scaling[slot]) / (1 - p)
            found = np.where(inside[:, None], wanted, 0.0)
            for i in range(count):
                at = int(chunks[first + i]) * CHUNK
                to = out[at : at + CHUNK, tile_column : tile_column + BLOCK_ROWS]
                write_once(to, found[:, i * CHUNK : (i + 1) * CHUNK].T)
            mine = slice(max(begin, row), max(min(end, row + BLOCK_ROWS), begin, row))
            write_once(rows[mine, rank : rank + count * CHUNK], found[inside])

    def _rank_part(
        self,
        values: Array,
        row: int,
        factor: Array,
        factor_row: int,
        count: int,
        columns: OutputColumns | None,
        part: int,
        parts: int,
    ) -> Array:
        """Sums of one block of a cluster, `[128, width of the kernel]`."""
        steps = -(-factor.shape[1] // PANEL)
        sums = np.zeros((BLOCK_ROWS, kernel_width(count)))
        for step in range(steps * part // parts, steps * (part + 1) // parts):
            k = step * PANEL
            column = k if columns is None else output_column(columns, k)
            stage = np.full((kernel_width(count), PANEL), np.nan)
            for i in range(count):
                stage[i * CHUNK : (i + 1) * CHUNK] = box(factor, factor_row + i * CHUNK, k, CHUNK)
            with np.errstate(invalid="ignore"):
                sums += box(values, row, column, BLOCK_ROWS) @ stage.T
        return sums

    def rank_sums(
        self,
        operands: SumOperands,
        form: RankForm,
        work: WorkItems,
        tables: SiteTables,
        *,
        blocks: int,
        overlaps_previous_kernel: bool,
        dropout: Dropout | None,
    ) -> None:
        """rank_sums.cu."""
        self.launches.append("sums")
        assert 0 < blocks <= work.count, f"blocks must be 1 to {work.count}, got {blocks}"
        x, first_row = drop(operands.x_TK.numpy(), dropout, operands.first_row), operands.first_row
        kinds = (
            (x, rows_of(form, operands.ds), tables.grad_a, first_row),
            (operands.dy_TN.numpy(), rows_of(form, operands.s), tables.grad_b, 0),
        )
        parts, counters = work.partial_sums.numpy(), work.counters
        assert not counters.any(), "counters must be zero between launches"
        parts[:] = np.nan
        for item in self._random.permutation(item_table(work.items, work.count)):
            values, rows, addresses, first = kinds[item[14]]
            feature, width, count, arena_row = item[4], item[5], item[6], item[8]
            portions = [self._run(values, rows, item, first)]
            if item[11] > 1:
                portions = self._gather(item, portions[0], parts, counters, work.borders.numpy())
            for sums, rank in itertools.product(portions, range(count * CHUNK)):
                address = int(addresses[arena_row + rank])
                if address:
                    grad = self._gradient_rows[address]
                    assert len(grad) == width, f"width must be {len(grad)}, got {width}"
                    grad[feature : feature + 2 * PANEL] += sums[: width - feature, rank]
        assert not counters.any(), "every part must arrive"

    def _run(self, values: Array, rows: Array, item: np.ndarray, first_row: int) -> Array:
        """Sums over an item's rows, `[128 features, width of the kernel]`."""
        begin, end, columns, count, rank = item[0], item[1], item[2:4], item[6], item[7]
        panels = 2 if count > 4 else 1
        sums = np.zeros((2 * PANEL, kernel_width(count)))
        for row in range(begin, end, PANEL):
            wide = np.hstack([box(values, row - first_row, c, PANEL) for c in columns])
            narrow = np.hstack([box(rows, row, rank + i * PANEL, PANEL) for i in range(panels)])
            wide[end - row :], narrow[end - row :] = 0.0, 0.0
            with np.errstate(invalid="ignore"):
                sums += wide.T @ narrow[:, : kernel_width(count)]
        # Accumulators are fp32: a run alone must leave what it leaves through the workspace.
        return sums.astype(np.float32)

    def _gather(
        self,
        item: np.ndarray,
        sums: Array,
        workspace: Array,
        counters: torch.Tensor,
        borders: np.ndarray,
    ) -> list[Array]:
        """The sums of each portion's runs for the part that arrives last; none for the others."""
        part, parts, begin, counter = (int(v) for v in item[10:14])
        share = sums.size
        room = workspace[begin * UNIT : begin * UNIT + share * parts].reshape(parts, *sums.shape)
        # Poison among the sums is of rank columns that nobody asked for.
        write_once(room[part], np.nan_to_num(sums))
        counters[counter] += 1
        if counters[counter] < parts:
            return []
        counters[counter] = 0
        inner = borders[slice(*borders[2 * counter : 2 * counter + 2])] if len(borders) else ()
        cuts = itertools.pairwise((0, *map(int, inner), parts))
        return [sum(room[i] for i in range(*cut)) for cut in cuts]

    def gemm(
        self,
        x_TK: torch.Tensor,
        weight: torch.Tensor,
        out_TN: torch.Tensor,
        tile: GemmTile,
        *,
        transposed: bool,
        overlaps_previous_kernel: bool,
        bias_N: torch.Tensor | None = None,
        rank: RankPart | None = None,
    ) -> None:
        """lora_gemm.cuh."""
        self.launches.append("gemm")
        self.masked_gemms.append(rank is not None and rank.dropout is not None)
        out = out_TN.numpy()
        base = (x_TK @ (weight.t() if transposed else weight)).numpy()
        if bias_N is not None:
            base = base + bias_N.numpy()
        keep = np.ones(out.shape, dtype=bool)
        if rank is not None and rank.dropout is not None:
            keep = keep_mask(rank.dropout, 0, *out.shape)
        for row in range(0, len(out), TILE_ROWS):
            for column in range(0, out.shape[1], tile.columns):
                at = np.s_[row : row + TILE_ROWS, column : column + tile.columns]
                write_once(out[at], base[at])
                if rank is not None:
                    rows, columns = out[at].shape
                    delta = self._rank_tile(rank, row // TILE_ROWS, column, tile.columns)
                    out[at] += delta[:rows, :columns] * keep[at]

    def _rank_tile(self, rank: RankPart, row_tile: int, column: int, width: int) -> Array:
        """The sum of the chunks for a tile, `[256, width]`."""
        bounds = rank.tile_chunks.numpy().reshape(-1, rank.num_targets + 1)[row_tile]
        first, last = targets_of(rank, column, column + width)
        sums, target = np.zeros((TILE_ROWS, width)), 0
        for chunk in range(bounds[first], bounds[last]):
            while chunk >= bounds[target + 1]:
                target += 1
            columns = rank.factors.columns
            arena = rank.factors.arenas[target if columns else 0].numpy()
            panels = []
            for n in range(column, column + width, PANEL):
                place = compact_column(columns[target], n) if columns else n
                panels.append(box(arena, int(rank.chunk_rows[chunk]), place, CHUNK))
            ext = chunks_of(rank.form, rank.flat)[chunk * CHUNK : (chunk + 1) * CHUNK]
            sums += ext.T @ np.hstack(panels)
        return sums
