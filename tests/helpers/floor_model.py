"""A group model whose numbers can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policy import NO_COST, ClusterShape, Policy, RegroupCost, Rules
from tlora_megatron.scheduler.queue import Job
from tlora_megatron.scheduler.registry import make_policy
from tlora_megatron.sim.cluster import Faults
from tlora_megatron.sim.ledger import Ledger
from tlora_megatron.sim.study import Simulator


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The answer of a `GroupThroughput`."""

    fits: bool
    tokens_per_s: tuple[float, ...]
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class FloorModel:
    """A step takes a second, or longer where a GPU has more than `gpu_tokens` to train in it.

    A job of batch 1 trains 100 tokens a step. `most_jobs` fit into the memory.
    """

    most_jobs: int = 8
    gpu_tokens: int = 1000

    def estimate(self, jobs: Sequence[JobLoad], num_gpus: int) -> Estimate:
        """Speeds of a group by the rule of the class."""
        tokens = [job.batch_tokens for job in jobs]
        step_s = max(1.0, sum(tokens) / (self.gpu_tokens * num_gpus))
        return Estimate(
            fits=len(jobs) <= self.most_jobs,
            tokens_per_s=tuple(t / step_s for t in tokens),
            memory_bytes=float(len(jobs)),
        )


class Wanted(NamedTuple):
    """A job of a `World` to be."""

    submit_s: float
    isolated_s: float
    fields: dict[str, Any]


def job(submit_s: float, isolated_s: float, **fields: Any) -> Wanted:
    """A job, with fields as `World.add` takes them."""
    return Wanted(submit_s, isolated_s, fields)


class World:
    """Jobs, speeds and a cluster for tests."""

    def __init__(
        self, *jobs: Wanted, nodes: int = 1, gpus_per_node: int = 1, most_jobs: int = 8
    ) -> None:
        self.shape = ClusterShape(num_nodes=nodes, gpus_per_node=gpus_per_node, nodes_per_rack=2)
        model = FloorModel(most_jobs=most_jobs)
        self.speeds = Speeds({"base": model, "other": model})
        self.jobs: list[Job] = []
        for wanted in jobs:
            self.add(wanted.submit_s, wanted.isolated_s, **wanted.fields)

    def add(
        self,
        submit_s: float,
        isolated_s: float,
        *,
        batch: int = 5,
        num_gpus: int = 1,
        base: str = "base",
        **fields: Any,
    ) -> Job:
        """One more job; those that come later must be added later."""
        load = JobLoad(
            name="job",
            rank=16,
            batch_size=batch,
            lengths=LengthHistogram.single(100),
            is_open=bool(fields.get("is_open")),
        )
        kind = self.speeds.kind(base, load)
        rates = self.speeds.rates((kind,), num_gpus)
        assert rates is not None
        index = len(self.jobs)
        job = Job(
            index=index,
            name=f"job{index}",
            base=base,
            kind=kind,
            num_gpus=num_gpus,
            submit_s=submit_s,
            isolated_s=isolated_s,
            isolated_tokens_per_s=rates.total,
            **{"max_slowdown": 2.0, **fields},
        )
        self.jobs.append(job)
        return job

    def run(
        self,
        policy: str | Policy,
        *,
        cost: RegroupCost = NO_COST,
        rules: dict[str, Any] | None = None,
        **more: Any,
    ) -> Ledger:
        if isinstance(policy, str):
            policy = make_policy(policy, self.speeds, Rules(cost=cost, **(rules or {})))
        world = {"jobs": self.jobs, "shape": self.shape, "speeds": self.speeds}
        calm: dict[str, Any] = {"faults": Faults(), "quotas": {}} | more
        return Simulator(**world, policy=policy, cost=cost, **calm).run()

    def ends(self, policy: str, **more: Any) -> list[float]:
        """When each job ends, in order of submission."""
        records = self.run(policy, **more).records
        return [record.end_s for record in sorted(records, key=lambda r: r.job.index)]
