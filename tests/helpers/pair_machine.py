"""rank_pair.cu on the CPU, as `item_machine` has the others: what items tell blocks to do."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from tests.helpers.item_machine import ItemMachine
from tests.helpers.item_parts import (
    BLOCK_ROWS,
    CHUNK,
    PANEL,
    TILE_ROWS,
    UNIT,
    Array,
    box,
    item_table,
    kernel_width,
    output_column,
    write_once,
)
from tlora_megatron.ops.lora.cuda.calls import Arenas, Dropout
from tlora_megatron.ops.lora.cuda.pair import PairOperands
from tlora_megatron.ops.lora.cuda.pair_items import PairFit
from tlora_megatron.ops.lora.cuda.rank_form import RankForm
from tlora_megatron.ops.lora.kernel_linear import SiteTables
from tlora_megatron.ops.lora.plan_tensors import WorkItems

WARP_ROWS = 16


class PairMachine(ItemMachine):
    """`ItemMachine` with the kernel that makes dS and dB in one pass."""

    def rank_pair(
        self,
        operands: PairOperands,
        factors: Arenas,
        form: RankForm,
        work: WorkItems,
        tables: SiteTables,
        *,
        fit: PairFit,
        chunks: torch.Tensor,
        scaling: torch.Tensor,
        dropout: Dropout | None,
    ) -> None:
        """rank_pair.cu."""
        self.launches.append("pair")
        dy, s = operands.dy_TN.numpy(), form.rows(operands.s).numpy()
        ext, rows = form.chunks(operands.ds).numpy(), form.rows(operands.ds).numpy()
        workspace, counters = work.partial_sums.numpy(), work.counters
        assert not counters.any(), "counters must be zero between launches"
        workspace[:] = np.nan
        for fields in self._random.permutation(item_table(work.items, work.count)):
            item = _Item(fields, fit)
            p = 0.0 if dropout is None else float(dropout.probability[item.slot])
            item.scale = float(scaling[item.slot]) / (1 - p)
            item.ext = lambda t, column, item=item: ext[
                int(chunks[item.chunk_of(t) + column // CHUNK]) * CHUNK + column % CHUNK
            ]
            item.clear_others()
            b_FR, columns = item.factor(factors)
            sums = np.zeros((len(b_FR), item.kernel_width))
            for step in range(item.steps):
                row = item.begin + step * BLOCK_ROWS
                valid = min(item.end - row, BLOCK_ROWS)
                wide = np.hstack([box(dy, row, c, BLOCK_ROWS) for c in columns])
                wide[-(-valid // WARP_ROWS) * WARP_ROWS :] = np.nan  # never copied
                with np.errstate(invalid="ignore"):
                    part = wide @ b_FR
                    narrow = box(s, row, item.rank_column, BLOCK_ROWS)[:, : item.kernel_width]
                    wide[valid:], narrow[valid:] = 0.0, 0.0
                    sums += wide.T @ narrow
                self._count(item, step, part, workspace, counters, rows)
            portions = self._portions(item, sums, workspace, counters, work.borders.numpy())
            for total, rank in itertools.product(portions, range(item.count * CHUNK)):
                address = int(tables.grad_b[item.arena_row + rank])
                if address:
                    grad = self._gradient_rows[address]
                    assert len(grad) == item.width, f"width must be {len(grad)}, got {item.width}"
                    grad[item.place : item.place + len(total)] += total[
                        : item.width - item.place, rank
                    ]
        assert not counters.any(), "every part must arrive"

    def _count(
        self,
        item: _Item,
        step: int,
        part: Array,
        workspace: Array,
        counters: torch.Tensor,
        rows: Array,
    ) -> None:
        """Leaves a part of dS; the last range adds all in order, here warp by warp."""
        if item.ranges == 1:
            item.write(step, 0, part, rows)
            return
        width = item.kernel_width
        begin = item.ds_workspace * UNIT + step * item.ranges * width * BLOCK_ROWS
        room = workspace[begin : begin + item.ranges * width * BLOCK_ROWS]
        assert len(room) == item.ranges * width * BLOCK_ROWS, "parts must lie in the workspace"
        room = room.reshape(item.ranges, BLOCK_ROWS, width)
        write_once(room[item.range], np.nan_to_num(part))
        for warp in range(BLOCK_ROWS // WARP_ROWS):
            at = item.ds_counter + step * (BLOCK_ROWS // WARP_ROWS) + warp
            counters[at] += 1
            if counters[at] == item.ranges:
                counters[at] = 0
                mine = slice(warp * WARP_ROWS, (warp + 1) * WARP_ROWS)
                item.write(step, warp * WARP_ROWS, sum(room[:, mine].astype(np.float64)), rows)

    def _portions(
        self,
        item: _Item,
        sums: Array,
        workspace: Array,
        counters: torch.Tensor,
        borders: np.ndarray,
    ) -> list[Array]:
        """dB of each portion's runs for the run that arrives last; none for the others."""
        sums = sums.astype(np.float32)
        if item.parts == 1:
            return [sums]
        share = item.most_panels * 2 * PANEL * item.kernel_width
        begin = item.workspace * UNIT
        room = workspace[begin : begin + share * item.parts].reshape(item.parts, share)
        mine = room[item.part, : sums.size].reshape(sums.shape)
        write_once(mine, np.nan_to_num(sums))
        counters[item.counter] += 1
        if counters[item.counter] < item.parts:
            return []
        counters[item.counter] = 0
        table = borders[2 * item.counter : 2 * item.counter + 2]
        inner = borders[slice(*table)] if len(borders) else ()
        cuts = itertools.pairwise((0, *map(int, inner), item.parts))
        parts = room[:, : sums.size].reshape(item.parts, *sums.shape)
        return [sum(parts[i] for i in range(*cut)) for cut in cuts]


class _Item:
    """An item's fields by name, as `Item` of rank_pair_copies.cuh, and its writes of dS."""

    def __init__(self, fields: np.ndarray, fit: PairFit) -> None:
        values = [int(v) for v in fields]
        self.begin, self.end, self.target, self.place, self.width, self.count = values[:6]
        self.rank_column, self.factor_row, self.arena_row, self.slot = values[6:10]
        self.part, self.parts, self.workspace, self.counter = values[10:14]
        self.ds_workspace, self.ds_counter, self.chunk, self.tile_chunks = values[14:18]
        self.kernel_width = kernel_width(self.count)
        assert self.kernel_width <= 64, f"an item must have 1 to 4 chunks, got {self.count}"
        self.most_panels = min(fit.most_panels, 128 // self.kernel_width)
        columns = self.most_panels * 2 * PANEL
        assert self.place % columns == 0, "a range must begin where the last one ends"
        self.panels = min(self.most_panels, -(-(self.width - self.place) // (2 * PANEL)))
        self.range, self.ranges = self.place // columns, -(-self.width // columns)
        self.steps = -(-(self.end - self.begin) // BLOCK_ROWS)
        self.scale = 0.0

    def factor(self, factors: Arenas) -> tuple[Array, list[int]]:
        """B of the range, `[columns, width of the kernel]`, and where halves of panels begin."""
        arena, c = factors.arenas[self.target].numpy(), factors.columns[self.target]
        halves, columns = [], []
        for place in range(self.place, self.place + self.panels * 2 * PANEL, PANEL):
            stage = np.full((self.kernel_width, PANEL), np.nan)
            for i in range(self.count):
                at = slice(i * CHUNK, (i + 1) * CHUNK)
                stage[at] = box(arena, self.factor_row + i * CHUNK, place, CHUNK)
            halves.append(stage.T)
            columns.append(output_column(c, place) if place < self.width else 1 << 30)
        return np.vstack(halves), columns

    def chunk_of(self, t: int) -> int:
        """Where the chunks of a row's tile begin in the table."""
        return self.chunk + (t // TILE_ROWS - self.begin // TILE_ROWS) * self.tile_chunks

    def clear_others(self) -> None:
        """Zeros in the rows of other adapters, at both ends of a segment."""
        if self.place:
            return
        spans = []
        if self.part == 0:
            spans.append((self.begin, 0, self.begin % TILE_ROWS))
        if self.part == self.parts - 1:
            spans.append((self.end - 1, (self.end - 1) % TILE_ROWS + 1, TILE_ROWS))
        for t, first, last in spans:
            for column in range(self.count * CHUNK):
                write_once(self.ext(t, column)[first:last], 0.0)

    def write(self, step: int, first: int, sums: Array, rows: Array) -> None:
        """Both forms of some rows of a step."""
        for i, values in enumerate(sums):
            t = self.begin + step * BLOCK_ROWS + first + i
            if t >= self.end:
                break
            kept = values[: self.count * CHUNK] * self.scale
            write_once(rows[t, self.rank_column : self.rank_column + len(kept)], kept)
            for column, value in enumerate(kept):
                write_once(self.ext(t, column)[t % TILE_ROWS : t % TILE_ROWS + 1], value)
