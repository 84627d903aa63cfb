"""The machines of an engine, and what jobs and groups cost on them.

Prices are by the planner's speeds, which measurements correct. Base models are added while jobs
arrive. A job that must train alone gets a pool of its own, which no other job shares; the model of
its speed is that of its base.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tlora_megatron.config.reader import must, read_spec
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.hardware import HardwareProfile, Link
from tlora_megatron.planner.search import GroupModel
from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.runtime.planning.plan_inputs import base_shape, plan_hardware, profile_of_gpu
from tlora_megatron.scheduler.group_throughput import CalibratedSpeeds, GroupThroughput
from tlora_megatron.scheduler.policy import ClusterShape, FreeGpus
from tlora_megatron.scheduler.queue import Job, Pause
from tlora_megatron.service.control.records import ALONE, LiveJob
from tlora_megatron.service.engines.protocol import NodeInfo
from tlora_megatron.service.settings import Settings
from tlora_megatron.sim.workload import PATIENCE_FACTOR, PATIENCE_S, state_bytes, weights_bytes

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
        return tuple(sorted(self.number(place) for place in places))

    def places(self, gpus: Iterable[int]) -> tuple[tuple[int, int], ...]:
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
    kept = asdict(pause)
    return {"places": [list(place) for place in machines.places(kept.pop("gpus"))], **kept}


def pause_from_json(kept: Mapping[str, Any], machines: Machines) -> Pause | None:
    """The pause of a job's row; None if some of its GPUs are gone."""
    times = dict(kept)
    places = [(int(node), int(gpu)) for node, gpu in times.pop("places")]
    return Pause(gpus=machines.numbers(places), **times) if machines.has(places) else None


def check_hardware(settings: Settings) -> None:
    """Refuses, before anything is started, a profile that does not exist."""
    hardware_profile(settings, slots=1)


def hardware_profile(settings: Settings, slots: int) -> HardwareProfile:
    """Returns the profile that was asked for, the GPU's by its name, or a rough one of CPUs.

    `slots` workers share the memory of a machine without GPUs. What a sampler has of a GPU's is not
    there. Raises `ValueError` if there is none.
    """
    found, taken = _profile(settings, slots), settings.sampler_gb * 1e9
    if taken >= found.memory_bytes:
        rule = f"leave gangs a part of a GPU's {found.memory_bytes / 1e9:.0f} GB"
        raise must("--sampler-memory", rule, settings.sampler_gb)
    return replace(found, memory_bytes=found.memory_bytes - taken)


def _profile(settings: Settings, slots: int) -> HardwareProfile:
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


_NETWORK = Link(bytes_per_s=2.2e10, latency_s=2.0e-5)
"""Between machines, where the profile knows none: 200 Gb/s for each GPU."""
_OPEN_S = 10 * 365 * 86_400.0
"""A job that ends when its client says so is priced as one that trains so long."""


class MemoryShares(NamedTuple):
    """Shares of the memory of each of its GPUs that a gang takes."""

    bare: float
    """Without jobs."""
    full: float
    """At most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBase:
    """A base model as the planner knows it."""

    model: GroupModel

    @property
    def weights_bytes(self) -> float:
        """Size of the base in bf16."""
        return weights_bytes(self.model.spec)

    def state_bytes(self, load: JobLoad) -> float:
        """Size of a job's adapter and optimizer state."""
        return state_bytes(self.model.spec, load)

    def plan(self, loads: Sequence[JobLoad], num_gpus: int) -> Plan | None:
        """The plan with which a gang starts: its LoRA sharding keeps every job's bits."""
        plan = self.model.estimate(_named(loads), num_gpus).plan
        if plan is None or not plan.sequence_parallel:
            return plan
        return replace(plan, lora_sharding="s_lora")

    def holds(self, loads: Sequence[JobLoad], plan: Plan | None) -> bool:
        """True if a gang under this plan can take these jobs: micro-batch and memory hold them."""
        return plan is None or not loads or self.model.holds(_named(loads), plan)

    def memory(self, loads: Sequence[JobLoad], plan: Plan | None) -> MemoryShares | None:
        """Memory that a gang of these jobs takes under a plan; None without one."""
        if plan is None:
            return None
        use = MemoryModel(self.model.spec, _named(loads), self.model.hardware).use(plan)
        there = self.model.hardware.memory_bytes
        bare = use.base_weights + use.collectives + use.reserved
        return MemoryShares(bare / there, use.total_bytes / there)


def planned_base(section: Mapping[str, Any], hardware: HardwareProfile) -> PlannedBase:
    """The costs of a base on some hardware; raises `ValueError` without its config.json."""
    spec = read_spec(BaseModelSpec, dict(section), "base_model")
    dtype = replace(hardware, dtype=spec.dtype)
    return PlannedBase(model=GroupModel(base_shape(spec), dtype))


class Pricing:
    """Prices jobs and groups by speeds that measurements correct."""

    def __init__(self, costs: Callable[[Mapping[str, Any]], PlannedBase]) -> None:
        """Begins without base models; `costs` makes those of a section `base_model`."""
        self._make = costs
        self._bases: dict[str, PlannedBase] = {}
        self._models: dict[str, GroupThroughput] = {}
        self._sections: dict[str, Mapping[str, Any]] = {}
        self.speeds = CalibratedSpeeds(self._models)

    def has_base(self, base: str) -> bool:
        return base in self._bases

    def add_base(self, base: str, section: Mapping[str, Any]) -> None:
        """Adds a base model; raises `ValueError` if its files cannot be read."""
        if base not in self._bases:
            self._bases[base] = self._make(section)
            self._sections[base] = section

    def base(self, pool: str) -> PlannedBase:
        return self._bases[_base_of(pool)]

    def section(self, pool: str) -> Mapping[str, Any]:
        """The section `base_model` of a pool's jobs."""
        return self._sections[_base_of(pool)]

    @property
    def weights_bytes(self) -> dict[str, float]:
        """Sizes of the base models, by pool."""
        return {pool: self.base(pool).weights_bytes for pool in self._models}

    def price(self, live: LiveJob, most_gpus: int) -> Job | None:
        """The job as policies see it, by present speeds, on as many GPUs as its memory needs.

        Then `num_gpus` of the job in memory grows. None if `most_gpus` cannot hold it.
        """
        assert live.load is not None, f"job {live.id} must be validated before it is priced"
        own = self._bases[live.base]
        self._models[live.pool] = own.model
        kind = self.speeds.kind(live.pool, live.load)
        self.speeds.prepare(kind, most_gpus)
        while live.num_gpus <= most_gpus:
            rates = self.speeds.rates((kind,), live.num_gpus)
            if rates is not None:
                is_open = live.load.is_open
                isolated_s = _OPEN_S if is_open else live.tokens / rates.total
                patience_s = PATIENCE_S
                patience_s += 0.0 if is_open else PATIENCE_FACTOR * isolated_s
                return Job(
                    index=live.number,
                    name=live.name,
                    base=live.pool,
                    kind=kind,
                    num_gpus=live.num_gpus,
                    submit_s=live.submitted_at,
                    isolated_s=isolated_s,
                    isolated_tokens_per_s=rates.total,
                    max_slowdown=live.max_slowdown,
                    priority=live.priority,
                    tenant=live.tenant,
                    due_s=live.submitted_at + patience_s,
                    is_open=is_open,
                    state_bytes=own.state_bytes(live.load),
                )
            live.num_gpus *= 2
        return None


def _base_of(pool: str) -> str:
    return pool.partition(ALONE)[0]


def _named(loads: Sequence[JobLoad]) -> list[JobLoad]:
    return [replace(load, name=str(place)) for place, load in enumerate(loads)]


def pricing_of(nodes: Sequence[NodeInfo], settings: Settings) -> Pricing:
    """Prices by the planner on these machines; raises `ValueError` for an unknown profile."""
    shape = Machines.of(nodes).shape
    profile = hardware_profile(settings, shape.gpus_per_node).of_nodes(shape.gpus_per_node)
    profile = replace(profile, inter_node=profile.inter_node or _NETWORK)
    return Pricing(partial(planned_base, hardware=profile))
