"""Several nodes, or one machine that NCCL takes for several, and the link between them."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.profiling.timer import CollectiveTimer, fit_link

_BYTES = (1 << 20, 1 << 23, 1 << 26)


def divide_into_nodes(nodes: int, world_size: int) -> None:
    """Has NCCL take the processes of one machine for those of several; before it is started.

    Raises:
        ValueError: if the processes cannot be divided evenly.
    """
    if nodes < 1 or world_size % nodes:
        raise ValueError(f"--nodes must divide the world of {world_size}, got {nodes}")
    rank = int(os.environ.get("RANK", "0"))
    os.environ["NCCL_HOSTID"] = f"node{rank // (world_size // nodes)}"


def over_nodes(profile: HardwareProfile, nodes: int, world_size: int) -> HardwareProfile:
    """The profile of smaller nodes with the link that an all-reduce over all of them has now."""
    from tlora_megatron.integrations.megatron.model import initialize_parallel

    initialize_parallel(ParallelLayout(dp_size=world_size))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timer = CollectiveTimer(world_size, device)
    link = fit_link([timer.measure("all_reduce", size) for size in _BYTES])
    per_node = world_size // nodes
    near = tuple(point for point in profile.collectives if point.ranks <= per_node)
    return replace(
        profile, gpus_per_node=per_node, inter_node=link, nics_per_node=None, collectives=near
    )
