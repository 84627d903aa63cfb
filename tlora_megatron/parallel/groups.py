"""This process's ranks in the super-model's layout, and the process groups it is in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tlora_megatron.model.deployment import Deployment
from tlora_megatron.model.layout import ExpertPlace, ParallelLayout
from tlora_megatron.parallel.cells import ReplicaCells


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
