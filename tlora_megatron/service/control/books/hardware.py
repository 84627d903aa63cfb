"""The profile of the machines that an engine has: the GPU's by its name, or a rough one of CPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tlora_megatron.planner.hardware import HardwareProfile, Link
from tlora_megatron.runtime.planning.plan_inputs import plan_hardware, profile_of_gpu
from tlora_megatron.service.control.books.machines import Machines
from tlora_megatron.service.control.books.pricing import Pricing, planned_base
from tlora_megatron.service.control.settings import Settings
from tlora_megatron.service.engines.protocol import NodeInfo

_CPU = "cpu"
_NETWORK = Link(bytes_per_s=2.2e10, latency_s=2.0e-5)
"""Between machines, where the profile knows none: 200 Gb/s for each GPU."""
_DRIVER = Path("/proc/driver/nvidia/gpus")


def pricing_of(nodes: Sequence[NodeInfo], settings: Settings) -> Pricing:
    """Prices by the planner, on the hardware of these machines.

    Raises:
        ValueError: if the profile that was asked for does not exist.
    """
    shape = Machines.of(nodes).shape
    profile = _profile(settings, shape.gpus_per_node).of_nodes(shape.gpus_per_node)
    profile = replace(profile, inter_node=profile.inter_node or _NETWORK)
    return Pricing(partial(planned_base, hardware=profile))


def check_hardware(settings: Settings) -> None:
    """Refuses, before anything is started, a profile that does not exist.

    Raises:
        ValueError: as `pricing_of`.
    """
    _profile(settings, seats=1)


def _profile(settings: Settings, seats: int) -> HardwareProfile:
    if settings.hardware is not None:
        return plan_hardware(settings.hardware)
    name = gpu_name()
    found = None if name is None else profile_of_gpu(name)
    if found is not None:
        return found
    if name is not None:
        raise ValueError(
            f"--hardware must name the profile of this machine's GPUs, got none for {name!r}: "
            "`tlora profile` measures one, and a similar GPU's is better than none"
        )
    return replace(plan_hardware(_CPU), memory_bytes=_host_memory() / seats)


def gpu_name() -> str | None:
    """Name of this machine's first GPU as its driver gives it; None without one."""
    try:
        for folder in sorted(_DRIVER.iterdir()):
            for line in (folder / "information").read_text().splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "Model":
                    return value.strip()
    except OSError:
        pass
    return None


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
