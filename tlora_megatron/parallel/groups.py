"""This process's ranks and groups in the super-model's layout, and cells that they sum.

Replicas of one layout hold equal shards, and one sum over them adds whole slabs. Unlike replicas
cut adapters at other layers and other columns. A cell is the largest part that no replica cuts: a
run of layers between two stages' borders of any replica, and of every factor there one *atom*, of
`Deployment.atoms` equal runs of columns. Of each replica one tensor and pipeline rank holds a cell,
with its context-parallel ranks.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from tlora_megatron.model.layout import Deployment, ExpertPlace, ParallelLayout, PlacedReplica


class Cell(NamedTuple):
    """One cell and the ranks that hold it, of every replica, ascending."""

    first_layer: int
    end_layer: int
    atom: int
    holders: tuple[int, ...]

    def has_layer(self, layer: int) -> bool:
        """True for a layer whose factors the cell has a part of."""
        return self.first_layer <= layer < self.end_layer


class ReplicaCells(NamedTuple):
    """The groups and places by which one process sums gradients over unlike replicas."""

    atoms: int
    tp_size: int
    tp_rank: int
    held: tuple[tuple[Cell, dist.ProcessGroup | None], ...]
    """This process's cells and the groups of their holders; None = nobody else holds it. Ascending
    by layer, then atom, on every process: whoever is in several groups enters them in one order, so
    that none waits for another in a circle."""

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
    rank = dist.get_rank()
    held: list[tuple[Cell, dist.ProcessGroup | None]] = []
    replica = deployment.placed(rank)
    for cell in all_cells(deployment, num_layers):
        # Every process takes part in making a group, whether it is in it or not.
        group = dist.new_group(list(cell.holders)) if len(cell.holders) > 1 else None
        if rank in cell.holders:
            held.append((cell, group))
    tp_rank, _, _ = replica.place_of(rank)
    return ReplicaCells(deployment.atoms, replica.layout.tp_size, tp_rank, tuple(held))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroups:
    """One process's place among those that hold routed experts, and the groups it is in."""

    place: ExpertPlace
    dp_rank: int
    """Its number among the replicas of the experts that it holds."""
    tp_group: dist.ProcessGroup
    """Ranks that hold parts of the same experts."""
    dp_group: dist.ProcessGroup
    """Replicas of this rank's part of its experts; tensor-parallel ranks where experts are whole on
    each of them."""
    holder_group: dist.ProcessGroup
    """Where `is_holder`, all that hold one replica of the whole adapters, stage by stage."""
    is_holder: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """Ranks and groups of one process, made by the integration that initialised them."""

    layout: ParallelLayout
    """Sizes of this process's own replica; its `dp_size` is the number of replicas."""
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    """Index of this process's replica."""
    tp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    """Replicas of this rank's adapter shards: data and context parallel ranks. Where replicas are
    unlike only those of its own."""
    model_group: dist.ProcessGroup
    """Tensor and pipeline ranks of one replica, TP fastest."""
    device: torch.device
    deployment: Deployment | None = None
    """All replicas where they are unlike; None = they are as `layout` says."""
    cells: ReplicaCells | None = None
    """The parts of adapters that unlike replicas sum; None = `dp_cp_group` sums whole slabs."""
    experts: ExpertGroups | None = None
    """Those of routed experts; None = the base has none, or none that carry adapters."""

    @property
    def expert_place(self) -> ExpertPlace:
        """This process's place among those that share a layer's routed experts."""
        return ExpertPlace() if self.experts is None else self.experts.place

    @property
    def most_stages(self) -> int:
        """Pipeline stages of the deepest replica."""
        return self.layout.pp_size if self.deployment is None else self.deployment.most_stages

    def budgets(self, run_tokens: int) -> tuple[int, ...]:
        """Returns the most rows of a micro-batch of every replica."""
        if self.deployment is None:
            return (run_tokens,) * self.layout.dp_size
        return self.deployment.budgets(run_tokens)

    @property
    def is_last_stage(self) -> bool:
        """True if this pipeline stage computes losses."""
        return self.pp_rank == self.layout.pp_size - 1

    @property
    def counts_losses(self) -> bool:
        """True on one rank of every set that computes the same losses."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def is_first_replica(self) -> bool:
        """True on the ranks that hold replica 0 of the adapters."""
        return self.dp_rank == 0 and self.cp_rank == 0

    @property
    def is_writer(self) -> bool:
        """True on the one process that writes files."""
        return dist.get_rank() == 0


def host_threads(most: int) -> int:
    """Returns this rank's share of the cores it may run on: at least 1, and at most `most`.

    The ranks of a node share its cores (`LOCAL_WORLD_SIZE`, as torchrun sets it).
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(most, len(os.sched_getaffinity(0)) // ranks))
