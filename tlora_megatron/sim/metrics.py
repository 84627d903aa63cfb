"""Numbers of a run: completion times, throughput, utilisation, slowdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlora_megatron.sim.ledger import JobRecord, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuCount:
    """What the cluster can do."""

    num_gpus: int
    flops_per_s: float
    """One GPU's best GEMM rate in its profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One policy's run. Completion times are over jobs that finished."""

    mean_jct_s: float
    p50_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    makespan_s: float
    """From the first submission to the last end."""
    throughput_tokens_per_s: float
    """Tokens trained in the window, over its length."""
    gpu_utilisation: float
    """Operations the tokens need at least, over what all GPUs could do in the window."""
    max_slowdown: float
    """Largest (end - start) / time alone."""
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
    """Jobs of the group that a held GPU works for, over time."""
    lost_tokens: float
    """Trained, then lost to failures of nodes."""
    window_s: float
    """From the first to the last submission; the whole run where that is shorter than the mean job.
    """


def summarise(
    records: Sequence[JobRecord],
    segments: Sequence[Segment],
    flops_per_token: Mapping[str, float],
    gpus: GpuCount,
) -> Summary:
    """The numbers of a run's books."""
    first = min(record.job.submit_s for record in records)
    makespan = max(record.end_s for record in records) - first
    window = max(record.job.submit_s for record in records) - first
    if window < _mean([record.job.isolated_s for record in records]):
        window = makespan
    end = first + window
    finished = [record for record in records if record.status == "finished"]
    jcts = sorted(record.jct_s for record in finished)
    waits = sorted(r.queueing_s for r in finished if r.queueing_s is not None)
    slowdowns = [record.slowdown for record in finished if record.slowdown is not None]
    count = {s: sum(r.status == s for r in records) for s in ("failed", "cancelled", "rejected")}
    tokens = {base: _tokens_until(segments, base, end) for base in flops_per_token}
    work = math.fsum(tokens[base] * flops for base, flops in flops_per_token.items())
    held = [(len(s.gpus) * max(0.0, min(s.end_s, end) - s.begin_s), s) for s in segments]
    gpu_s = math.fsum(time for time, _ in held)
    capacity_s = gpus.num_gpus * window
    return Summary(
        mean_jct_s=_mean(jcts),
        p50_jct_s=quantile(jcts, 0.5),
        p95_jct_s=quantile(jcts, 0.95),
        p99_jct_s=quantile(jcts, 0.99),
        makespan_s=makespan,
        throughput_tokens_per_s=_ratio(math.fsum(tokens.values()), window),
        gpu_utilisation=_ratio(work, capacity_s * gpus.flops_per_s),
        max_slowdown=max(slowdowns, default=0.0),
        jobs_finished=len(finished),
        jobs_failed=count["failed"],
        jobs_cancelled=count["cancelled"],
        jobs_rejected=count["rejected"],
        gpu_allocation=_ratio(gpu_s, capacity_s),
        mean_queueing_s=_mean(waits),
        p95_queueing_s=quantile(waits, 0.95),
        mean_slowdown=_mean(slowdowns),
        mean_group_size=_ratio(math.fsum(time * s.num_jobs for time, s in held), gpu_s),
        lost_tokens=math.fsum(record.lost_tokens for record in records),
        window_s=window,
    )


def _tokens_until(segments: Sequence[Segment], base: str, end_s: float) -> float:
    return math.fsum(
        s.tokens_per_s * max(0.0, min(s.end_s, end_s) - s.ready_s)
        for s in segments
        if s.base == base
    )


def quantile(ordered: Sequence[float], q: float) -> float:
    """The nearest-rank quantile of ascending values; 0 of none."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLine:
    """Means over equal bins of a run."""

    bin_s: float
    tokens_per_s: tuple[float, ...]
    busy_gpus: tuple[float, ...]
    waiting: tuple[float, ...]
    """Jobs that have not trained yet."""


def time_line(
    records: Sequence[JobRecord], segments: Sequence[Segment], until_s: float, bins: int = 240
) -> TimeLine:
    """A run from its begin to `until_s` in bins."""
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
    """Adds `value`, held from begin to end, to the means of the bins it covers."""
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
