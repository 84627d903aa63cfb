"""This process's ranks in the super-model's layout, and the process groups it is in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tlora_megatron.model.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """Ranks and groups of one process, made by the integration that initialised them."""

    layout: ParallelLayout
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    """Replicas of this rank's adapter shards: data and context parallel ranks."""
    model_group: dist.ProcessGroup
    """Tensor and pipeline ranks of one replica, TP fastest."""
    device: torch.device

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
