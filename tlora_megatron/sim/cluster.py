"""The simulated cluster: its description, and its fleet, whose every change enters the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tlora_megatron.config.job import rule
from tlora_megatron.config.reader import ConfigError, must, read_spec
from tlora_megatron.config.source import read_document
from tlora_megatron.planner.hardware import HardwareProfile, Link, find_profile, shipped_profiles
from tlora_megatron.scheduler.cluster import ClusterShape
from tlora_megatron.scheduler.fleet import Fleet
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.jobs import Group, Member
from tlora_megatron.sim.events import Events, Faults, Kind
from tlora_megatron.sim.ledger import Ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class RegroupSpec:
    """Pauses of groups that change."""

    admit_s: float = rule("pause in seconds when a job joins a running group", ge=0)
    replan_s: float = rule(
        "pause in seconds when a group gets other GPUs: plan, process groups, warm-up", ge=0
    )
    state_bytes_per_s: float = rule(
        "speed of saving and loading adapters and optimizer state", gt=0
    )
    weights_bytes_per_s: float = rule(
        "speed of loading the base model onto GPUs that lack it", gt=0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaSpec:
    """The quota of a tenant."""

    tenant: str = rule("name of the tenant in the trace", nonempty=True)
    gpus: int = rule("most GPUs that its running jobs may ask for together", ge=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """A cluster of equal nodes."""

    name: str = rule("name of the cluster in reports", nonempty=True)
    nodes: int = rule("number of nodes", ge=1)
    gpus_per_node: int = rule("GPUs per node", ge=1)
    nodes_per_rack: int = rule("nodes per rack", ge=1)
    profile: str = rule(
        "hardware profile: a name in this file's folder or configs/hardware, or a path",
        nonempty=True,
    )
    inter_node: Link = rule(
        "network between nodes, of one card where nics_per_node is given, else one GPU's share; "
        "replaces the profile's"
    )
    nics_per_node: int | None = rule(
        "network cards of a node, as in a profile; replaces the profile's", default=None, ge=1
    )
    regroup: RegroupSpec = rule("pauses of groups that change")
    quotas: tuple[QuotaSpec, ...] = rule("quotas of tenants", default=())

    @property
    def shape(self) -> ClusterShape:
        """The shape of the cluster for the scheduler."""
        return ClusterShape(
            num_nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            nodes_per_rack=self.nodes_per_rack,
        )


def load_cluster(path: str | Path) -> tuple[ClusterSpec, HardwareProfile]:
    """Reads a cluster and the profile of its GPUs.

    Raises:
        ConfigError: if either file is missing or invalid.
    """
    path = Path(path)
    document = read_document(path, "--cluster")
    try:
        spec = read_spec(ClusterSpec, document, "cluster")
    except ConfigError as error:
        raise ConfigError(f"{error} in {path}") from None
    profile = find_profile(spec.profile, (path.parent, shipped_profiles()), "cluster.profile")
    if spec.gpus_per_node > profile.gpus_per_node:
        raise must(
            "cluster.gpus_per_node",
            f"be at most {profile.gpus_per_node}, what {profile.name} connects",
            spec.gpus_per_node,
        )
    profile = profile.of_nodes(spec.gpus_per_node)
    return spec, replace(profile, inter_node=spec.inter_node, nics_per_node=spec.nics_per_node)


class SimulatedFleet(Fleet):
    """A fleet whose groups end by the model's speeds, or fail where a fault was drawn."""

    def __init__(
        self,
        *,
        shape: ClusterShape,
        speeds: Speeds,
        faults: Faults,
        quotas: Mapping[str, int],
        events: Events,
        ledger: Ledger,
    ) -> None:
        """Begins with all GPUs free; `events` and `ledger` are shared with the simulator."""
        super().__init__(shape=shape, speeds=speeds, quotas=quotas)
        self._faults = faults
        self._events = events
        self._ledger = ledger

    def stop_s(self, group: Group, member: Member) -> float:
        """When a member ends or fails if nothing changes."""
        fails_after = self._faults.fails_after_tokens.get(member.job.index)
        if fails_after is None:
            return group.end_s(member)
        left = member.tokens_left - (member.job.tokens - fails_after)
        return group.ready_s + max(0.0, left) / member.tokens_per_s

    def open(self, group: Group) -> None:
        """Puts a group on free GPUs, and its first end among the events."""
        super().open(group)
        stop_s = min([self.stop_s(group, member) for member in group.members])
        self._events.push(stop_s, Kind.GROUP, group.number)

    def close(self, group: Group, now_s: float) -> None:
        """Takes a group off its GPUs and enters what it trained."""
        self._ledger.close(group, now_s)
        super().close(group, now_s)
