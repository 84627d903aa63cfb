"""Replays one trace on one cluster under several policies, with equal jobs and faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from tlora_megatron.config.reader import must
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.group import GroupModel
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policy import RegroupCost, Rules
from tlora_megatron.scheduler.registry import make_policy
from tlora_megatron.sim.bounds import least_mean_jct_s
from tlora_megatron.sim.cluster import ClusterSpec, FaultRates, draw_faults
from tlora_megatron.sim.ledger import Ledger, Summary, summarise
from tlora_megatron.sim.simulator import Simulator
from tlora_megatron.sim.trace import Trace, TraceShape, shaped
from tlora_megatron.sim.workload import (
    JobMix,
    flops_per_token,
    make_jobs,
    weights_bytes,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    shape: TraceShape = field(default_factory=TraceShape)
    seed: int = 0
    max_slowdown: float | None = None
    """Bound on every job's slowdown; None: the mix's bound."""
    faults: FaultRates = field(default_factory=FaultRates)
    use_residual: bool = True
    keep_bounds: bool = True
    free_moves: bool = False
    """If True, changes of groups cost no time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRun:
    """The ledger and the numbers of one policy's run."""

    policy: str
    summary: Summary
    ledger: Ledger = field(repr=False)
    longest_decide_s: float
    """CPU time of the longest decision."""
    wall_s: float


class Study:
    """A trace prepared once (shaped, jobs and faults drawn); `run` replays it under a policy."""

    def __init__(
        self,
        *,
        trace: Trace,
        cluster: ClusterSpec,
        profile: HardwareProfile,
        mix: JobMix,
        specs: dict[str, ModelSpec],
        options: Options,
    ) -> None:
        """Shapes the trace, and draws jobs and faults.

        Raises:
            ValueError: if no job is left, or a job does not fit into memory.
        """
        self.cluster = cluster
        self.options = options
        self.mix = mix
        self.profile = profile
        shape = cluster.shape
        self.trace = shaped(trace, options.shape, shape.num_gpus, options.seed)
        self.speeds = Speeds({name: GroupModel(spec, profile) for name, spec in specs.items()})
        self.jobs = make_jobs(
            self.trace,
            mix,
            specs,
            self.speeds,
            options.seed,
            options.max_slowdown,
        )
        self._faults = draw_faults(options.faults, self.jobs, shape.num_nodes, options.seed)
        self._flops = {name: flops_per_token(spec) for name, spec in specs.items()}
        self._cost = _regroup_cost(cluster, specs, free=options.free_moves)

    @property
    def offered_load(self) -> float:
        """GPU time that the jobs take alone, over the cluster's from first to last submission."""
        jobs = self.jobs
        span = jobs[-1].submit_s - jobs[0].submit_s
        asked = sum(job.num_gpus * job.isolated_s for job in jobs)
        return asked / (span * self.cluster.shape.num_gpus) if span else float("inf")

    @property
    def load(self) -> float:
        """The load that was asked for; the offered load of a trace that is replayed as recorded."""
        asked = self.options.shape.load
        return self.offered_load if asked is None else asked

    @cached_property
    def least_jct_s(self) -> float | None:
        """A mean completion time that no policy beats; None with faults."""
        if self.options.faults != FaultRates():
            return None
        num_gpus = self.cluster.shape.num_gpus
        quotas = {quota.tenant: quota.gpus for quota in self.cluster.quotas}
        jobs = [j for j in self.jobs if j.num_gpus <= quotas.get(j.tenant, num_gpus)]
        return least_mean_jct_s(jobs, self.speeds, num_gpus)

    def run(self, policy: str, on_progress: Callable[[float], None] | None = None) -> PolicyRun:
        """Replays the trace under a policy; raises `ValueError` or `InvariantError`."""
        options = self.options
        rules = Rules(
            keep_bounds=options.keep_bounds,
            use_residual=options.use_residual,
            cost=self._cost,
        )
        simulator = Simulator(
            jobs=self.jobs,
            shape=self.cluster.shape,
            policy=make_policy(policy, self.speeds, rules),
            speeds=self.speeds,
            cost=self._cost,
            faults=self._faults,
            quotas={quota.tenant: quota.gpus for quota in self.cluster.quotas},
            on_progress=on_progress,
        )
        begin = time.perf_counter()
        ledger = simulator.run()
        wall_s = time.perf_counter() - begin
        summary = summarise(
            ledger.records,
            ledger.segments,
            self._flops,
            num_gpus=self.cluster.shape.num_gpus,
            flops_per_s=max(point.forward_flops_per_s for point in self.profile.gemms),
        )
        return PolicyRun(
            policy=policy,
            summary=summary,
            ledger=ledger,
            longest_decide_s=simulator.longest_decide_s,
            wall_s=wall_s,
        )


def check_policies(names: Sequence[str]) -> None:
    """Refuses unknown and repeated names of policies."""
    if not names or len(set(names)) < len(names):
        raise must("--policy", "name policies once each", ",".join(names))
    for name in names:
        make_policy(name, Speeds({}), Rules())


def _regroup_cost(cluster: ClusterSpec, specs: dict[str, ModelSpec], *, free: bool) -> RegroupCost:
    if free:
        infinite = float("inf")
        return RegroupCost(
            admit_s=0.0, replan_s=0.0, state_bytes_per_s=infinite, weights_bytes_per_s=infinite
        )
    weights = {name: weights_bytes(spec) for name, spec in specs.items()}
    return RegroupCost(**asdict(cluster.regroup), weights_bytes=weights)
