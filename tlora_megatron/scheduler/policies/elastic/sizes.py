"""On how many GPUs a job is to train: fast for itself, without taking much from those who wait."""

from __future__ import annotations

from collections.abc import Mapping

from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.jobs import Job, Waiting

_EXPECTED = 0.05
"""Added to the number of jobs that wait, so that a job never takes GPUs that bring it nothing."""


class Sizes:
    """Numbers of GPUs for single jobs, as their speeds suggest."""

    def __init__(self, speeds: Speeds, num_gpus: int) -> None:
        """Begins for a cluster of so many GPUs."""
        self._speeds = speeds
        self._num_gpus = num_gpus

    def of(self, job: Job) -> Mapping[int, float]:
        """Numbers of GPUs that are worth holding, with the speed on them.

        For a job that a client drives, what it asks for: how much work it has is unknown.
        """
        found = {} if job.is_open else self._speeds.sizes(job.kind, self._num_gpus)
        return found or {job.num_gpus: job.isolated_tokens_per_s}

    def least_s(self, waiting: Waiting) -> float:
        """Time that the remaining work takes where the job is fastest; 0 if its client waits."""
        if waiting.job.is_open:
            return 0.0
        return waiting.tokens_left / max(self.of(waiting.job).values())

    def by_cost(self, waiting: Waiting, num_waiting: int) -> list[int]:
        """Numbers of GPUs, the best first: the job's own time, and what that costs the others.

        Each GPU second delays every job that waits by a second over the cluster's GPUs.
        """
        share = (num_waiting + _EXPECTED) / self._num_gpus
        found = self.of(waiting.job)
        return sorted(found, key=lambda g: (waiting.tokens_left / found[g] * (1 + share * g), g))
