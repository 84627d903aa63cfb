"""Prices jobs and groups by the planner's speeds, which measurements correct.

Base models are added while jobs arrive. A job that must train alone gets a pool of its own, which
no other job shares; the model of its speed is that of its base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from tlora_megatron.config.reader import read_spec
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.group import GroupModel
from tlora_megatron.planner.hardware import HardwareProfile, Link
from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.runtime.planning.plan_inputs import base_shape
from tlora_megatron.scheduler.group_throughput import CalibratedSpeeds, GroupThroughput
from tlora_megatron.scheduler.queue import Job
from tlora_megatron.service.control.machines import Machines, hardware_profile
from tlora_megatron.service.control.records import ALONE, LiveJob
from tlora_megatron.service.engines.protocol import NodeInfo
from tlora_megatron.service.settings import Settings
from tlora_megatron.sim.workload import PATIENCE_FACTOR, PATIENCE_S, state_bytes, weights_bytes

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
        """The planner's choice, with the LoRA sharding that keeps every job's bits."""
        plan = self.model.estimate(_named(loads), num_gpus).plan
        if plan is None or not plan.sequence_parallel:
            return plan
        return replace(plan, lora_sharding="s_lora")

    def holds(self, loads: Sequence[JobLoad], plan: Plan | None) -> bool:
        """True if the longest sequence fits the micro-batch, and all jobs the memory."""
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
        """True if the base model was added before."""
        return base in self._bases

    def add_base(self, base: str, section: Mapping[str, Any]) -> None:
        """Adds a base model; raises `ValueError` if its files cannot be read."""
        if base not in self._bases:
            self._bases[base] = self._make(section)
            self._sections[base] = section

    def section(self, pool: str) -> Mapping[str, Any]:
        """The section `base_model` of a pool's jobs."""
        return self._sections[_base_of(pool)]

    @property
    def weights_bytes(self) -> dict[str, float]:
        """Sizes of the base models, by pool."""
        return {pool: self._bases[_base_of(pool)].weights_bytes for pool in self._models}

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

    def plan(self, pool: str, loads: Sequence[JobLoad], num_gpus: int) -> Plan | None:
        """The plan with which a gang of these jobs starts."""
        return self._bases[_base_of(pool)].plan(loads, num_gpus)

    def holds(self, pool: str, loads: Sequence[JobLoad], plan: Plan | None) -> bool:
        """True if a gang under this plan can take these jobs."""
        return self._bases[_base_of(pool)].holds(loads, plan)

    def memory(self, pool: str, loads: Sequence[JobLoad], plan: Plan | None) -> MemoryShares | None:
        """Memory that a gang of these jobs takes on each of its GPUs; None if unknown."""
        return self._bases[_base_of(pool)].memory(loads, plan)


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
