"""Cells: the parts of an adapter whose gradients replicas of unlike layouts sum.

Replicas of one layout hold equal shards, and one sum over them adds whole slabs. Unlike replicas
cut adapters at other layers and other columns. A cell is the largest part that no replica cuts: a
run of layers between two stages' borders of any replica, and of every factor there one *atom*, of
`Deployment.atoms` equal runs of columns. Of each replica one tensor and pipeline rank holds a cell,
with its context-parallel ranks.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch.distributed as dist

from tlora_megatron.model.deployment import Deployment, PlacedReplica


class Cell(NamedTuple):
    """One cell and the ranks that hold it, of every replica, ascending."""

    first_layer: int
    end_layer: int
    atom: int
    holders: tuple[int, ...]

    def has_layer(self, layer: int) -> bool:
        """True for a layer whose factors the cell has a part of."""
        return self.first_layer <= layer < self.end_layer


class HeldCell(NamedTuple):
    """A cell of this process, and the group of its holders; None = nobody else holds it."""

    cell: Cell
    group: dist.ProcessGroup | None


class ReplicaCells(NamedTuple):
    """The groups and places by which one process sums gradients over unlike replicas."""

    atoms: int
    tp_size: int
    tp_rank: int
    held: tuple[HeldCell, ...]
    """Ascending by layer, then atom, on every process: whoever is in several groups enters them in
    one order, so that none waits for another in a circle."""

    @property
    def own_atoms(self) -> range:
        """The atoms that this process holds."""
        per_rank = self.atoms // self.tp_size
        return range(self.tp_rank * per_rank, (self.tp_rank + 1) * per_rank)


def all_cells(deployment: Deployment, num_layers: int) -> tuple[Cell, ...]:
    """Returns every cell, ascending by layer, then atom; the same on every process."""
    borders = deployment.stage_borders(num_layers)
    replicas = deployment.placed_replicas()
    return tuple(
        Cell(begin, end, atom, _holders(replicas, deployment.atoms, num_layers, begin, atom))
        for begin, end in itertools.pairwise(borders)
        for atom in range(deployment.atoms)
    )


def _holders(
    replicas: tuple[PlacedReplica, ...], atoms: int, num_layers: int, layer: int, atom: int
) -> tuple[int, ...]:
    found = []
    for replica in replicas:
        tp_size, pp_size, _ = replica.layout.grid
        place = (atom * tp_size // atoms, layer * pp_size // num_layers)
        found += [rank for rank in replica.ranks if replica.place_of(rank)[:2] == place]
    return tuple(found)


def make_replica_cells(deployment: Deployment, num_layers: int) -> ReplicaCells:
    """Makes the groups of all cells; collective over the world, in one order on every process."""
    rank, held = dist.get_rank(), []
    replica = deployment.placed(rank)
    for cell in all_cells(deployment, num_layers):
        # Every process takes part in making a group, whether it is in it or not.
        group = dist.new_group(list(cell.holders)) if len(cell.holders) > 1 else None
        if rank in cell.holders:
            held.append(HeldCell(cell, group))
    tp_rank, _, _ = replica.place_of(rank)
    return ReplicaCells(deployment.atoms, replica.layout.tp_size, tp_rank, tuple(held))
