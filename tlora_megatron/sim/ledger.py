"""Accounts for the jobs and GPU seconds of a run, and checks that they add up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tlora_megatron.scheduler.invariants import require
from tlora_megatron.scheduler.jobs import Group, Job, Member

Status = Literal["finished", "failed", "cancelled", "rejected"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """The history of one job in the cluster."""

    job: Job
    status: Status
    end_s: float
    start_s: float | None = None
    """When it first trained; None if it never did."""
    slowdown: float | None = None
    """(end - last start) / time alone; None for jobs that did not finish."""
    lost_tokens: float = 0.0
    """Tokens that were trained and then lost when nodes failed."""

    @property
    def jct_s(self) -> float:
        """Job completion time: from submission to the end."""
        return self.end_s - self.job.submit_s

    @property
    def queueing_s(self) -> float | None:
        """Time from submission to the first training."""
        return None if self.start_s is None else self.start_s - self.job.submit_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The life of one group, from its forming until it changed or ended."""

    begin_s: float
    ready_s: float
    """When it began to train; `end_s` if it never did."""
    end_s: float
    gpus: tuple[int, ...]
    base: str
    num_jobs: int
    tokens_per_s: float

    @property
    def tokens(self) -> float:
        """Tokens that all members trained."""
        return self.tokens_per_s * (self.end_s - self.ready_s)


class Ledger:
    """Records jobs and groups, with the sums that must agree at the end."""

    def __init__(self, keeps_bounds: bool) -> None:
        self.records: list[JobRecord] = []
        self.segments: list[Segment] = []
        self.busy_gpu_s = 0.0
        """GPU seconds held so far."""
        self._keeps_bounds = keeps_bounds
        self._trained: dict[int, float] = {}
        self._lost: dict[int, float] = {}
        self._first_start: dict[int, float] = {}
        self._clock_s = 0.0

    def advance(self, now_s: float, busy_gpus: int) -> None:
        """Advances the clock; `busy_gpus` GPUs were held since the last call."""
        require(now_s >= self._clock_s, f"time must not go back from {self._clock_s} to {now_s}")
        self.busy_gpu_s += busy_gpus * (now_s - self._clock_s)
        self._clock_s = now_s

    def close(self, group: Group, now_s: float) -> None:
        """Records that a group changes or ends."""
        ready_s = min(max(group.ready_s, group.formed_s), now_s)
        trained_s = max(0.0, now_s - group.ready_s)
        for member in group.members:
            index = member.job.index
            if trained_s > 0 and index not in self._first_start:
                self._first_start[index] = max(member.started_s, group.ready_s)
            tokens = member.tokens_left - group.tokens_left(member, now_s)
            self._trained[index] = self._trained.get(index, 0.0) + tokens
        self.segments.append(
            Segment(
                begin_s=group.formed_s,
                ready_s=ready_s,
                end_s=now_s,
                gpus=group.gpus,
                base=group.base,
                num_jobs=len(group.members),
                tokens_per_s=group.tokens_per_s,
            )
        )

    def lose(self, index: int, tokens: float) -> None:
        """Records that a failure loses trained tokens of a job."""
        self._lost[index] = self._lost.get(index, 0.0) + tokens

    def finish(self, member: Member, now_s: float) -> None:
        """Records that a job has trained all its tokens."""
        job = member.job
        slowdown = (now_s - member.started_s) / job.isolated_s
        done = self._trained[job.index] - self._lost.get(job.index, 0.0)
        require(
            math.isclose(done, job.tokens, rel_tol=1e-6, abs_tol=1e-3),
            f"tokens trained must be {job.tokens} for job {job.name}, got {done}",
        )
        if self._keeps_bounds:
            require(
                now_s <= member.deadline_s * (1 + 1e-9) + 1e-5,
                f"slowdown must be at most {job.max_slowdown} for job {job.name}, got {slowdown}",
            )
        self._record(job, "finished", now_s, slowdown)

    def drop(self, job: Job, status: Status, now_s: float) -> None:
        """Records that a job ends without finishing."""
        self._record(job, status, now_s, None)

    def _record(self, job: Job, status: Status, now_s: float, slowdown: float | None) -> None:
        self.records.append(
            JobRecord(
                job=job,
                status=status,
                end_s=now_s,
                start_s=self._first_start.get(job.index),
                slowdown=slowdown,
                lost_tokens=self._lost.get(job.index, 0.0),
            )
        )

    def balance(self, jobs: list[Job]) -> None:
        """Checks the account at the end of a run.

        Raises:
            InvariantError: if a job is missing or repeated, or GPU seconds do not add up.
        """
        ended = sorted(record.job.index for record in self.records)
        require(
            ended == [job.index for job in jobs],
            f"each of {len(jobs)} jobs must end once, got {len(ended)} ends",
        )
        held = math.fsum(len(s.gpus) * (s.end_s - s.begin_s) for s in self.segments)
        require(
            math.isclose(held, self.busy_gpu_s, rel_tol=1e-6, abs_tol=1e-3),
            f"GPU seconds of groups must be the cluster's {self.busy_gpu_s}, got {held}",
        )
        tokens = math.fsum(segment.tokens for segment in self.segments)
        trained = math.fsum(self._trained.values())
        require(
            math.isclose(tokens, trained, rel_tol=1e-6, abs_tol=1e-3),
            f"tokens of groups must be the jobs' {trained}, got {tokens}",
        )
