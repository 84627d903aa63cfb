"""Keeps the accounts of a run, checks that they balance, and computes its numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tlora_megatron.scheduler.fleet import require
from tlora_megatron.scheduler.queue import Group, Job, Member

Status = Literal["finished", "failed", "cancelled", "rejected"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
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

    def finish(self, member: Member, now_s: float, alone_s: float) -> None:
        """Records that a job has trained all its tokens, which alone takes it `alone_s`."""
        job = member.job
        slowdown = (now_s - member.started_s) / alone_s
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
        self.drop(job, "finished", now_s, slowdown)

    def drop(self, job: Job, status: Status, now_s: float, slowdown: float | None = None) -> None:
        """Records that a job ends; its slowdown is given if it has finished."""
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
        """Checks the account at the end of a run: all jobs once, and GPU seconds that add up."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The numbers of one policy's run. Completion times (JCT) are of jobs that finished."""

    mean_jct_s: float
    p50_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    makespan_s: float
    """From the first submission to the last end."""
    throughput_tokens_per_s: float
    """Tokens trained in the window, per second."""
    gpu_utilisation: float
    """Operations that the tokens need at least, as a share of what all GPUs could do."""
    max_slowdown: float
    """Largest (end - start) / (time alone) of a job."""
    jobs_finished: int
    jobs_failed: int
    jobs_cancelled: int
    jobs_rejected: int
    gpu_allocation: float
    """Share of the GPU time in the window that some group held."""
    mean_queueing_s: float
    p95_queueing_s: float
    mean_slowdown: float
    mean_group_size: float
    """Mean number of jobs in the group of a held GPU, over time."""
    lost_tokens: float
    """Tokens that were trained and then lost when nodes failed."""
    bounds_missed: int
    """Jobs that ended later after their submission than bound x time alone: waiting counts."""
    gpu_hours: float
    """Hours that groups held GPUs, over the whole run: what is paid for."""
    window_s: float
    """Measured time: first to last submission, or the whole run if the mean job takes longer."""


_SLACK = 1 + 1e-9


def summarise(
    records: Sequence[JobRecord],
    segments: Sequence[Segment],
    flops_per_token: Mapping[str, float],
    *,
    num_gpus: int,
    flops_per_s: float,
) -> Summary:
    """Summarises a run on so many GPUs, each of which does `flops_per_s` at best."""
    first = min(record.job.submit_s for record in records)
    makespan = max(record.end_s for record in records) - first
    # From the first to the last submission; the makespan if the mean job takes longer.
    window = max(record.job.submit_s for record in records) - first
    if window < mean([record.job.isolated_s for record in records]):
        window = makespan
    end = first + window
    finished = [record for record in records if record.status == "finished"]
    jcts = sorted(record.jct_s for record in finished)
    waits = sorted(r.queueing_s for r in finished if r.queueing_s is not None)
    slowdowns = [record.slowdown for record in finished if record.slowdown is not None]
    count = Counter(record.status for record in records)
    tokens = {base: _tokens_until(segments, base, end) for base in flops_per_token}
    work = math.fsum(tokens[base] * flops for base, flops in flops_per_token.items())
    held_s = [len(s.gpus) * max(0.0, min(s.end_s, end) - s.begin_s) for s in segments]
    weighted_s = (held * s.num_jobs for held, s in zip(held_s, segments, strict=True))
    gpu_s = math.fsum(held_s)
    capacity_s = num_gpus * window
    return Summary(
        mean_jct_s=mean(jcts),
        p50_jct_s=quantile(jcts, 0.5),
        p95_jct_s=quantile(jcts, 0.95),
        p99_jct_s=quantile(jcts, 0.99),
        makespan_s=makespan,
        throughput_tokens_per_s=_ratio(math.fsum(tokens.values()), window),
        gpu_utilisation=_ratio(work, capacity_s * flops_per_s),
        max_slowdown=max(slowdowns, default=0.0),
        jobs_finished=len(finished),
        jobs_failed=count["failed"],
        jobs_cancelled=count["cancelled"],
        jobs_rejected=count["rejected"],
        gpu_allocation=_ratio(gpu_s, capacity_s),
        mean_queueing_s=mean(waits),
        p95_queueing_s=quantile(waits, 0.95),
        mean_slowdown=mean(slowdowns),
        mean_group_size=_ratio(math.fsum(weighted_s), gpu_s),
        lost_tokens=math.fsum(record.lost_tokens for record in records),
        bounds_missed=sum(
            r.jct_s > _SLACK * r.job.max_slowdown * r.job.isolated_s for r in finished
        ),
        gpu_hours=math.fsum(len(s.gpus) * (s.end_s - s.begin_s) for s in segments) / 3600,
        window_s=window,
    )


def _tokens_until(segments: Sequence[Segment], base: str, end_s: float) -> float:
    return math.fsum(
        s.tokens_per_s * max(0.0, min(s.end_s, end_s) - s.ready_s)
        for s in segments
        if s.base == base
    )


def quantile(ordered: Sequence[float], q: float) -> float:
    """The nearest-rank quantile of ascending values; 0 without values."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0


def mean(values: Sequence[float]) -> float:
    """The mean; 0 without values."""
    return math.fsum(values) / len(values) if values else 0.0


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLine:
    """Means over equal time bins of a run."""

    bin_s: float
    tokens_per_s: tuple[float, ...]
    busy_gpus: tuple[float, ...]
    waiting: tuple[float, ...]
    """Jobs that have not trained yet."""


def time_line(
    records: Sequence[JobRecord], segments: Sequence[Segment], until_s: float, bins: int = 240
) -> TimeLine:
    """The time line of a run from its begin to `until_s`."""
    bin_s = max(until_s, 1e-9) / bins
    tokens, busy, waiting = [0.0] * bins, [0.0] * bins, [0.0] * bins
    for segment in segments:
        spread(tokens, bin_s, segment.ready_s, segment.end_s, segment.tokens_per_s)
        spread(busy, bin_s, segment.begin_s, segment.end_s, len(segment.gpus))
    for record in records:
        start_s = record.end_s if record.start_s is None else record.start_s
        spread(waiting, bin_s, record.job.submit_s, start_s, 1)
    return TimeLine(
        bin_s=bin_s, tokens_per_s=tuple(tokens), busy_gpus=tuple(busy), waiting=tuple(waiting)
    )


def spread(bins: list[float], bin_s: float, begin_s: float, end_s: float, value: float) -> None:
    """Adds `value`, which lasts from begin to end, to the means of the bins it covers."""
    end_s = min(end_s, bin_s * len(bins))
    if end_s <= begin_s:
        return
    first, last = int(begin_s / bin_s), min(int(end_s / bin_s), len(bins) - 1)
    if first >= last:
        bins[min(first, last)] += value * (end_s - begin_s) / bin_s
        return
    bins[first] += value * (first + 1 - begin_s / bin_s)
    for place in range(first + 1, last):
        bins[place] += value
    bins[last] += value * (end_s / bin_s - last)
