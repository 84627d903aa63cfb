"""The cells of one adapter's slab, as strided views that a sum packs and unpacks.

In every slab a factor is `[rank, features]` and tensor parallelism cuts its columns, so one rule
finds an atom in it. The sum of one adapter's gradient over unlike replicas is

1. a reduce-scatter of the TP-replicated factors' partial sums over the tensor-parallel ranks, after
   which each has the atoms that it holds of the sharded factors;
2. for each cell, ascending, an all-reduce over its holders;
3. an all-gather of the TP-replicated factors' atoms.

Factors of one target recur at a constant stride over the layers: a cell is a few views
`[layers, rank, columns]`, however many layers there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from tlora_megatron.layers.slab_layout import Factor, SlabLayout
from tlora_megatron.parallel.collectives import all_gather_rows, reduce_scatter_rows
from tlora_megatron.parallel.groups import ReplicaCells

_RUNS = {"linear_fc1": 2}
"""Runs of columns in which a fused target's sharded factor lies: gate, then up."""


class _Piece(NamedTuple):
    """Some columns of one factor, or of the same factor of several layers, in two buffers."""

    key: tuple[str, str, int]
    """Target, factor and run: those of equal keys recur over the layers."""
    begin: int
    """The place of its first element in the slab."""
    row_size: int
    """Elements from one row to the next in the slab."""
    packed_begin: int
    """The place of its first element in the packed buffer."""
    packed_row_size: int
    num_rows: int
    num_columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The key that pieces of one strided view share."""
        return self.row_size, self.packed_row_size, self.num_rows, self.num_columns


class _Run(NamedTuple):
    """Pieces at constant strides."""

    first: _Piece
    num_pieces: int
    stride: int
    packed_stride: int

    def in_slab(self, flat: Tensor) -> Tensor:
        """Returns the view `[pieces, rows, columns]` of a flat slab."""
        return self._view(flat, self.first.begin, self.stride, self.first.row_size)

    def packed(self, flat: Tensor) -> Tensor:
        """Returns the view `[pieces, rows, columns]` of a contiguous packed buffer."""
        first = self.first
        return self._view(flat, first.packed_begin, self.packed_stride, first.packed_row_size)

    def _view(self, flat: Tensor, begin: int, stride: int, row_size: int) -> Tensor:
        shape = (self.num_pieces, self.first.num_rows, self.first.num_columns)
        return flat.as_strided(shape, (stride, row_size, 1), flat.storage_offset() + begin)


class PackedPart(NamedTuple):
    """A part of a slab that lies anywhere in it, and in one piece in a packed buffer."""

    runs: tuple[_Run, ...]
    numel: int
    is_slab: bool
    """True if it is the whole slab as it lies."""

    def pack(self, slab: Tensor, into: Tensor) -> None:
        """Copies the part of a flat slab to a buffer `[numel]`."""
        for run in self.runs:
            run.packed(into).copy_(run.in_slab(slab))

    def unpack(self, packed: Tensor, slab: Tensor) -> None:
        """Copies a buffer `[numel]` to its places in a flat slab: inverse of `pack`."""
        for run in self.runs:
            run.in_slab(slab).copy_(run.packed(packed))


class SlabCells:
    """The cells of the slabs of one layout, and the sum over them.

    Raises:
        ValueError: if a factor's features cannot be divided into atoms.
    """

    def __init__(self, layout: SlabLayout, cells: ReplicaCells) -> None:
        self.cells = cells
        self.numel = layout.numel
        self._layout = layout
        for factor in layout.factors:
            self._check(factor)
        self.parts = tuple(self._part(cell.has_layer, [cell.atom]) for cell, _ in cells.held)
        """One for each cell that this process holds."""
        self.replicated: tuple[PackedPart, ...] = ()
        """For each tensor-parallel rank its atoms of the replicated factors."""
        if layout.replicated_numel:
            own = len(cells.own_atoms)
            self.replicated = tuple(
                self._part(lambda _: True, range(k * own, (k + 1) * own), only_replicated=True)
                for k in range(cells.tp_size)
            )

    def sum_over_replicas(self, grad: Tensor, tp_group: dist.ProcessGroup) -> None:
        """Sums a flat gradient `[numel]` over all replicas, in place.

        Collectives: one over the tensor-parallel ranks before and one after an all-reduce of each
        cell, in one order on all processes; the next begins when the last is done.
        """
        self._scatter_replicated(grad, tp_group)
        for part, (_, group) in zip(self.parts, self.cells.held, strict=True):
            if group is None:
                continue
            if part.is_slab:
                dist.all_reduce(grad, group=group)
                continue
            packed = grad.new_empty(part.numel)
            part.pack(grad, packed)
            dist.all_reduce(packed, group=group)
            part.unpack(packed, grad)
        self._gather_replicated(grad, tp_group)

    def _scatter_replicated(self, grad: Tensor, tp_group: dist.ProcessGroup) -> None:
        if not self.replicated:
            return
        partial = grad.new_empty(len(self.replicated), self.replicated[0].numel)
        for part, row in zip(self.replicated, partial, strict=True):
            part.pack(grad, row)
        own = reduce_scatter_rows(partial, tp_group).wait()[0]
        self.replicated[self.cells.tp_rank].unpack(own, grad)

    def _gather_replicated(self, grad: Tensor, tp_group: dist.ProcessGroup) -> None:
        if not self.replicated:
            return
        mine = self.replicated[self.cells.tp_rank]
        own = grad.new_empty(1, mine.numel)
        mine.pack(grad, own[0])
        for part, row in zip(self.replicated, all_gather_rows(own, tp_group), strict=True):
            part.unpack(row, grad)

    def _check(self, factor: Factor) -> None:
        count = self.cells.atoms if self._is_replicated(factor) else len(self.cells.own_atoms)
        pieces = count * _num_runs(factor, is_whole=count == 1)
        if factor.shape[1] % pieces:
            raise ValueError(
                f"features of {factor.name} must be a multiple of {pieces} to be summed over "
                f"replicas whose TP sizes have the multiple {self.cells.atoms}, got "
                f"{factor.shape[1]}; take TP sizes that divide it"
            )

    def _is_replicated(self, factor: Factor) -> bool:
        return factor.offset < self._layout.replicated_numel

    def _part(
        self,
        has_layer: Callable[[int], bool],
        atoms: Sequence[int],
        *,
        only_replicated: bool = False,
    ) -> PackedPart:
        pieces: list[_Piece] = []
        packed = 0
        for factor in self._layout.factors:
            if only_replicated and not self._is_replicated(factor):
                continue
            for atom in atoms if has_layer(factor.shard.layer) else ():
                found = list(self._pieces(factor, atom, packed))
                pieces += found
                packed += factor.shape[0] * sum(piece.num_columns for piece in found)
        is_slab = packed == self.numel and all(
            p.begin == p.packed_begin and p.row_size == p.packed_row_size for p in pieces
        )
        return PackedPart(tuple(_joined(pieces)), packed, is_slab)

    def _pieces(self, factor: Factor, atom: int, packed: int) -> Iterator[_Piece]:
        """Yields the columns of an atom in one factor; packed, they lie side by side."""
        count, index = len(self.cells.own_atoms), atom - self.cells.own_atoms.start
        if self._is_replicated(factor):
            count, index = self.cells.atoms, atom
        rows, features = factor.shape
        runs = _num_runs(factor, is_whole=count == 1)
        width = features // (runs * count)
        for run in range(runs):
            column = run * features // runs + index * width
            yield _Piece(
                key=(factor.shard.target, f"{factor.which} {atom}", run),
                begin=factor.offset + column,
                row_size=features,
                packed_begin=packed + run * width,
                packed_row_size=runs * width,
                num_rows=rows,
                num_columns=width,
            )


def _num_runs(factor: Factor, *, is_whole: bool) -> int:
    """Runs of columns of a factor in each of which an atom has its part; a whole factor is one."""
    if is_whole or factor.shard.lora_b_rows is None or factor.which == "lora_a":
        return 1
    return _RUNS.get(factor.shard.target, 1)


def _joined(pieces: Sequence[_Piece]) -> Iterator[_Run]:
    """Joins the pieces of equal keys that lie at constant strides in both buffers."""
    by_key: dict[tuple[str, str, int], list[_Piece]] = {}
    for piece in pieces:
        by_key.setdefault(piece.key, []).append(piece)
    for alike in by_key.values():
        yield from _runs(alike)


def _runs(pieces: Sequence[_Piece]) -> Iterator[_Run]:
    run = _Run(pieces[0], 1, 0, 0)
    for before, piece in itertools.pairwise(pieces):
        stride = piece.begin - before.begin
        packed_stride = piece.packed_begin - before.packed_begin
        goes_on = run.num_pieces == 1 or (stride, packed_stride) == (run.stride, run.packed_stride)
        if goes_on and piece.shape == before.shape:
            run = _Run(run.first, run.num_pieces + 1, stride, packed_stride)
            continue
        yield run
        run = _Run(piece, 1, 0, 0)
    yield run
