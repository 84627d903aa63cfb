"""The machines of an engine: GPUs by number, which of them are set aside, and their profile."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.runtime.planning.plan_inputs import plan_hardware, profile_of_gpu
from tlora_megatron.scheduler.policy import ClusterShape, FreeGpus
from tlora_megatron.scheduler.queue import Pause
from tlora_megatron.service.engines.protocol import NodeInfo
from tlora_megatron.service.settings import Settings

_CPU = "cpu"
_DRIVER = Path("/proc/driver/nvidia/gpus")
DAY_S = 86_400.0
_DEATHS = 2
"""Deaths by the processes on a GPU within a day, after which it is set aside."""
_KILLS = 6
"""The same with those by signals from outside, such as the host's when its memory is full."""
_MOST_SHARE = 4
"""One in so many GPUs at most: a job that ends its gangs must not close a cluster to the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """A cluster of equal nodes that holds an engine's machines; what they lack is missing."""

    shape: ClusterShape
    missing: tuple[int, ...]
    """GPU numbers that no machine has, on nodes that are up."""
    down: tuple[int, ...]
    """Nodes that are not healthy, or that the engine has no machine for."""
    hosts: tuple[str, ...] = field(compare=False)
    """Address of each node, empty where there is no machine."""

    @classmethod
    def of(cls, nodes: Sequence[NodeInfo]) -> Machines:
        """The cluster of an engine's nodes; raises `ValueError` if they have no worker slot."""
        widest = max((node.gpus for node in nodes), default=0)
        if not widest:
            raise ValueError("an engine must have at least one GPU or worker slot, got none")
        count = 1 + max(node.node for node in nodes)
        shape = ClusterShape(num_nodes=count, gpus_per_node=widest, nodes_per_rack=count)
        known = {node.node: node for node in nodes}
        down = [i for i in range(count) if i not in known or not known[i].healthy]
        missing = [
            gpu for node in nodes if node.healthy for gpu in shape.gpus_of(node.node)[node.gpus :]
        ]
        hosts = tuple(known[i].address if i in known else "" for i in range(count))
        return cls(shape=shape, missing=tuple(missing), down=tuple(down), hosts=hosts)

    def number(self, place: tuple[int, int]) -> int:
        """Cluster-wide number of a node's GPU."""
        node, gpu = place
        return node * self.shape.gpus_per_node + gpu

    def numbers(self, places: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Cluster-wide numbers, ascending."""
        return tuple(sorted(self.number(place) for place in places))

    def places(self, gpus: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Node and GPU of each number."""
        size = self.shape.gpus_per_node
        return tuple((gpu // size, gpu % size) for gpu in gpus)

    def has(self, places: Iterable[tuple[int, int]]) -> bool:
        """True if all these GPUs are there, on nodes that are up."""
        nodes, size = self.shape.num_nodes, self.shape.gpus_per_node
        return all(
            node < nodes
            and gpu < size
            and node not in self.down
            and self.number((node, gpu)) not in self.missing
            for node, gpu in places
        )

    def nodes_of(self, gpus: Iterable[int]) -> set[int]:
        """The nodes that some GPUs are in."""
        return {gpu // self.shape.gpus_per_node for gpu in gpus}


class SetAside:
    """Takes GPUs out of the free ones as soon as no group holds them, and gives them back later."""

    def __init__(self, free: FreeGpus) -> None:
        self._free = free
        self._deaths: dict[int, list[tuple[float, bool]]] = {}
        """When gangs died on a GPU, and whether from outside."""
        self.until_s: dict[int, float] = {}
        """End of each GPU's time aside, also of those that a group still holds."""
        self._taken: set[int] = set()

    def died(self, gpu: int, at_s: float, *, was_killed: bool = False) -> bool:
        """Notes that a gang died by its process on a GPU; True if that sets the GPU aside.

        Args:
            was_killed: a signal from outside ended the process.
        """
        recent = [death for death in self._deaths.get(gpu, ()) if at_s - death[0] < DAY_S]
        self._deaths[gpu] = deaths = [*recent, (at_s, was_killed)]
        by_itself = sum(not was_killed for _, was_killed in deaths)
        return (by_itself >= _DEATHS or len(deaths) >= _KILLS) and self.put([gpu], at_s)

    def put(self, gpus: Collection[int], at_s: float) -> bool:
        """Sets GPUs aside for a day; False if these would be too many of the cluster's."""
        new = set(gpus) - set(self.until_s)
        if not new or _MOST_SHARE * len(new | set(self.until_s)) > self._free.shape.num_gpus:
            return False
        self.until_s.update(dict.fromkeys(new, at_s + DAY_S))
        return True

    def sweep(self, now_s: float) -> bool:
        """Takes what became free, and returns True if it gave back what has waited for a day."""
        size = self._free.shape.gpus_per_node
        over = {gpu for gpu, until_s in self.until_s.items() if until_s <= now_s}
        for gpu in over:
            del self.until_s[gpu]
        back = sorted(self._taken & over)
        self._taken -= over
        self._free.give(back)
        held = set(self.until_s) - self._taken
        found = {gpu for gpu in held if gpu in self._free.in_node(gpu // size)}
        self._free.take(sorted(found))
        self._taken |= found
        return bool(back)


def pause_to_json(pause: Pause, machines: Machines) -> dict[str, Any]:
    """The form in which a job's row keeps its pause; GPUs by machine, since numbers may change."""
    return {
        "places": [list(place) for place in machines.places(pause.gpus)],
        "back_by_s": pause.back_by_s,
        "started_s": pause.started_s,
        "deadline_s": pause.deadline_s,
    }


def pause_from_json(kept: Mapping[str, Any], machines: Machines) -> Pause | None:
    """The pause of a job's row; None if some of its GPUs are gone."""
    places = [(int(node), int(gpu)) for node, gpu in kept["places"]]
    if not machines.has(places):
        return None
    return Pause(
        gpus=machines.numbers(places),
        back_by_s=float(kept["back_by_s"]),
        started_s=float(kept["started_s"]),
        deadline_s=float(kept["deadline_s"]),
    )


def check_hardware(settings: Settings) -> None:
    """Refuses, before anything is started, a profile that does not exist."""
    hardware_profile(settings, slots=1)


def hardware_profile(settings: Settings, slots: int) -> HardwareProfile:
    """Returns the profile that was asked for, the GPU's by its name, or a rough one of CPUs.

    `slots` workers share the memory of a machine without GPUs. Raises `ValueError` if there is
    none.
    """
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
    memory_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return replace(plan_hardware(_CPU), memory_bytes=memory_bytes / slots)


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
