"""Memory that every process of a group reaches at an address of its own, over NVLink or PCIe.

torch's symmetric memory does the mapping. NVLink multicast is never used, and kept off.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tlora_megatron.ops.kernel_build import ExtensionUnavailable, load_extension
from tlora_megatron.ops.lora.cuda_arguments import MAX_RANKS


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmetricMemory:
    """A buffer of the same size on each process of a group."""

    local: torch.Tensor
    """This process's buffer, uint8."""
    addresses: tuple[int, ...]
    """Addresses at which this process sees the buffer of each rank."""
    handle: Any
    """torch's handle, which keeps the mappings."""


def allocate(group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> SymmetricMemory:
    """Allocates zeros that all processes can reach; a collective. Waits for the device.

    Raises:
        RuntimeError: if the devices cannot reach each other's memory.
    """
    from torch.distributed import _symmetric_memory as symmetric

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.empty_cache()  # it comes from the driver, and torch may hold all there is
    local = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    local.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(local, group)
    bases = tuple(int(base) for base in handle.buffer_ptrs)
    inside = local.data_ptr() - bases[dist.get_rank(group)]
    # No flag may be raised in memory that its owner has yet to clear.
    dist.barrier(group, device_ids=[device.index])
    return SymmetricMemory(
        local=local, addresses=tuple(base + inside for base in bases), handle=handle
    )


def obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns why this group cannot use peer memory, the same on every process; None if it can.

    A collective. Builds the CUDA extension if need be.
    """
    found: list[tuple[str, str, str | None]] = [("", "", None)] * dist.get_world_size(group)
    own = (socket.gethostname(), _uuid(device.index), _own_obstacle(group, device))
    dist.all_gather_object(found, own, group=group)
    reasons = [reason for _, _, reason in found if reason is not None]
    if reasons:
        return reasons[0]
    if len({host for host, _, _ in found}) > 1:
        return "the group spans several hosts"
    unreachable: list[str | None] = [None] * len(found)
    dist.all_gather_object(unreachable, _unreachable(device, [u for _, u, _ in found]), group=group)
    return next((reason for reason in unreachable if reason is not None), None)


def _own_obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    if dist.get_world_size(group) > MAX_RANKS:
        return f"a group may have {MAX_RANKS} processes, this has {dist.get_world_size(group)}"
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "the CUDA extension is built for Hopper GPUs"
    try:
        load_extension()
    except ExtensionUnavailable as error:
        return str(error)
    return None


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _unreachable(device: torch.device, peers: list[str]) -> str | None:
    """Names a peer that this device sees but cannot reach.

    Nothing can be said beforehand of peers that are hidden from this process.
    """
    for other in range(torch.cuda.device_count()):
        if other == device.index or _uuid(other) not in peers:
            continue
        if not torch.cuda.can_device_access_peer(device.index, other):
            return f"GPU {device.index} of {socket.gethostname()} cannot reach GPU {other}"
    return None
