"""Ways to all-reduce between the GPUs of one machine, behind the package's interface.

`copy_engine` and `nccl` are the package's own; the others are there to compare with.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tlora_megatron.parallel.copy_engine import CopyEngineCollectives
from tlora_megatron.parallel.tensor_collectives import GroupCollectives, TensorCollectives

MECHANISMS = ("copy_engine", "nccl", "nccl_4", "nccl_16", "two_shot")
"""nccl_4: NCCL with 4 blocks."""


def make_mechanism(
    name: str, group: dist.ProcessGroup, device: torch.device, max_bytes: int
) -> TensorCollectives:
    """One of `MECHANISMS`, ready for two lanes."""
    made: TensorCollectives
    if name == "copy_engine":
        made = CopyEngineCollectives(group, device, max_bytes)
    elif name == "two_shot":
        made = TwoShotCollectives(group, device, max_bytes)
    else:
        made = GroupCollectives(_nccl_group(group, name, device))
    made.prepare(2)
    return made


class TwoShotCollectives(GroupCollectives):
    """All-reduces with torch's two-shot kernel over symmetric memory; the rest with NCCL."""

    name = "two_shot"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> None:
        super().__init__(group)
        self._device, self._max_bytes = device, max_bytes
        self._buffers: list[torch.Tensor] = []

    def prepare(self, num_lanes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        for _ in range(len(self._buffers), num_lanes):
            buffer = symmetric.empty(
                self._max_bytes // 2, dtype=torch.bfloat16, device=self._device
            )
            symmetric.rendezvous(buffer, self.group)
            self._buffers.append(buffer)

    def all_reduce(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        if x_TH.dtype != torch.bfloat16 or x_TH.nbytes % (16 * self.size):
            return super().all_reduce(x_TH, lane)
        shared = self._buffers[lane][: x_TH.numel()].view_as(x_TH)
        shared.copy_(x_TH)
        two_shot = torch.ops.symm_mem.two_shot_all_reduce_out
        two_shot(shared, "sum", self.group.group_name, x_TH)
        return x_TH


def _nccl_group(group: dist.ProcessGroup, name: str, device: torch.device) -> dist.ProcessGroup:
    """The group itself, or one of the same ranks whose kernels have so many blocks."""
    if name == "nccl":
        return group
    blocks = int(name.removeprefix("nccl_"))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas = options.config.max_ctas = blocks
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="nccl", pg_options=options)
