"""Proposes changes that may make a plan fit: more GPUs, fewer jobs, shorter sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.workload import JobLoad

MOST_GPUS = 4096
"""Most GPUs that are planned for."""


def more_gpus(num_gpus: int, hardware: HardwareProfile) -> Iterator[int]:
    """Larger numbers of GPUs: every number within a node, then whole nodes."""
    node = hardware.gpus_per_node
    yield from range(num_gpus + 1, node + 1)
    nodes = 1
    while hardware.inter_node is not None and nodes * node < MOST_GPUS:
        # 2, 3, 4, 6, 8, 12, 16, ... nodes
        nodes = nodes // 2 * 3 if nodes.bit_count() == 1 and nodes > 1 else 2 ** nodes.bit_length()
        if num_gpus < nodes * node <= MOST_GPUS:
            yield nodes * node


def fewer_jobs(jobs: Sequence[JobLoad], fits: Callable[[Sequence[JobLoad]], bool]) -> Iterator[str]:
    """Proposes to leave out the largest adapters, as few of them as possible."""
    ordered = sorted(jobs, key=lambda job: job.rank * len(job.targets))
    low, high = 0, len(ordered)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(ordered[:middle]) else (low, middle)
    if low:
        names = ", ".join(job.name for job in ordered[low:])
        yield f"run {low} of the {len(jobs)} jobs, without {names}"


def shorter(jobs: Sequence[JobLoad], fits: Callable[[Sequence[JobLoad]], bool]) -> Iterator[str]:
    """Proposes to cut the longest sequences to a power of two, as little as possible."""
    longest = max(job.lengths.longest for job in jobs)
    for length in (2**n for n in range(longest.bit_length() - 1, 7, -1)):
        cut = [replace(job, lengths=job.lengths.clipped(length), longest_eval=0) for job in jobs]
        if length < longest and fits(cut):
            yield f"cut sequences to {length} tokens"
            return
