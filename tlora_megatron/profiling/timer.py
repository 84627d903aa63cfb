"""Times operations on a device that is kept busy, and collectives by size within one node."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.parallel.collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from tlora_megatron.planner.hardware import CollectiveOp, CollectivePoint, Link
from tlora_megatron.training.round_timing import queue_moment, seconds_between

_CYCLES_PER_S = 2.1e9
"""Upper bound on any GPU's clock, so that a wait of this many cycles is long enough."""
_MOST_AHEAD_S = 0.5
_ALONE = 5
"""Calls that are timed one by one."""


class DeviceTimer:
    """Times calls that run in turn, back to back; on a CPU by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def medians(
        self,
        calls: Sequence[Callable[[], object]],
        *,
        seconds: float,
        most: int = 20,
        ahead: bool = False,
    ) -> list[float]:
        """Median seconds of each call over turns in which each runs once.

        Waits for the device, before and after.

        Args:
            seconds: about how long to measure; three turns at least.
            ahead: the device waits until the host has queued everything: for calls that take the
                host longer than the device.
        """
        self._turn(calls)
        self.synchronize()
        begin = time.perf_counter()
        marks = self._turn(calls)
        host_s = time.perf_counter() - begin
        self.synchronize()
        turn_s = sum(_gaps(marks))
        turns = max(3, min(most, int(seconds / max(turn_s, host_s if ahead else 0.0, 1e-9))))
        if ahead and self.device.type == "cuda":
            wait_s = min(1.3 * host_s * turns, _MOST_AHEAD_S)
            torch.cuda._sleep(int(wait_s * _CYCLES_PER_S))
        rounds = [self._turn(calls) for _ in range(turns)]
        self.synchronize()
        return [statistics.median(times) for times in zip(*map(_gaps, rounds), strict=True)]

    def sustained_s(self, call: Callable[[], object], turns: int) -> float:
        """Mean seconds of a call that is repeated `turns` times without waiting in between.

        The number is fixed and not the time, because a call with collectives must be made equally
        often on every process.
        """
        call()
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(turns):
            call()
        self.synchronize()
        return (time.perf_counter() - begin) / turns

    def host_s(self, call: Callable[[], object]) -> float:
        """Median seconds from a call to the end of its work on the device, each alone."""
        times = []
        for _ in range(_ALONE + 1):
            self.synchronize()
            begin = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _turn(self, calls: Sequence[Callable[[], object]]) -> list[Any]:
        """Runs each call; returns moments in the device's queue, before and after each."""
        marks = [queue_moment(self.device)]
        for call in calls:
            call()
            marks.append(queue_moment(self.device))
        return marks


def _gaps(marks: Sequence[Any]) -> list[float]:
    return list(itertools.starmap(seconds_between, itertools.pairwise(marks)))


_COLUMNS = 1024
_IN_A_ROW, _REPEATS = 5, 5
_ELEMENT_BYTES = 2
OPS: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "p2p")


class CollectiveTimer:
    """Times collectives of groups of `ranks` neighbours; all groups run at once.

    Every process of the world must make every call, because groups are made by all processes.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        if world % ranks:
            raise ValueError(f"ranks must divide the world of {world}, got {ranks}")
        self.ranks = ranks
        self.device = device
        self._index = rank % ranks
        self._members = list(range(rank - self._index, rank - self._index + ranks))
        groups = [dist.new_group(list(range(b, b + ranks))) for b in range(0, world, ranks)]
        self._group = groups[rank // ranks]
        self._synchronize = DeviceTimer(device).synchronize

    def measure(self, op: CollectiveOp, num_bytes: int) -> CollectivePoint:
        """Time of one call when several follow each other, in the slowest group."""
        rows = max(self.ranks, num_bytes // (_COLUMNS * _ELEMENT_BYTES))
        rows -= rows % self.ranks
        return CollectivePoint(
            op=op,
            ranks=self.ranks,
            bytes=float(rows * _COLUMNS * _ELEMENT_BYTES),
            seconds=self._seconds(self._call(op, rows)),
        )

    def overlap(self, num_bytes: int, gemm_size: int) -> float:
        """Share of an all-reduce that GEMMs of about the same time hide."""
        rows = num_bytes // (_COLUMNS * _ELEMENT_BYTES)
        x = torch.zeros(rows, _COLUMNS, device=self.device, dtype=torch.bfloat16)
        a, b = (
            torch.randn(gemm_size, gemm_size, device=self.device, dtype=torch.bfloat16)
            for _ in range(2)
        )

        def gemm() -> None:
            torch.mm(a, b)

        def together() -> None:
            pending = all_reduce(x, self._group)
            gemm()
            pending.wait()

        alone = self._seconds(lambda: all_reduce(x, self._group).wait())
        compute = self._seconds(gemm)
        hidden = alone + compute - self._seconds(together)
        return min(1.0, max(0.0, hidden / min(alone, compute)))

    def _call(self, op: CollectiveOp, rows: int) -> Callable[[], object]:
        whole = torch.zeros(rows, _COLUMNS, device=self.device, dtype=torch.bfloat16)
        part = whole[: rows // self.ranks]
        if op == "all_reduce":
            return lambda: all_reduce(whole, self._group).wait()
        if op == "all_gather":
            return lambda: all_gather_rows(part, self._group)
        if op == "reduce_scatter":
            return lambda: reduce_scatter_rows(whole, self._group).wait()
        return self._exchange(whole)

    def _exchange(self, whole: Tensor) -> Callable[[], object]:
        """Every rank except the last sends to the next, as between pipeline stages."""
        received = torch.empty_like(whole)
        index, members, group = self._index, self._members, self._group

        def call() -> None:
            operations = []
            if index + 1 < self.ranks:
                operations.append(dist.P2POp(dist.isend, whole, members[index + 1], group))
            if index:
                operations.append(dist.P2POp(dist.irecv, received, members[index - 1], group))
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return call

    def _seconds(self, call: Callable[[], object]) -> float:
        times = []
        for repeat in range(_REPEATS + 1):
            self._synchronize()
            dist.barrier(self._group)
            self._synchronize()
            begin = time.perf_counter()
            for _ in range(_IN_A_ROW):
                call()
            self._synchronize()
            if repeat:
                times.append((time.perf_counter() - begin) / _IN_A_ROW)
        slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)


def fit_link(points: Sequence[CollectivePoint]) -> Link:
    """Fits the bandwidth and latency of a ring to the widest all-reduce.

    Raises:
        ValueError: if no all-reduce was measured.
    """
    reduces = [p for p in points if p.op == "all_reduce"]
    if not reduces:
        raise ValueError("points must hold an all-reduce, got none")
    ranks = max(p.ranks for p in reduces)
    widest = sorted((p for p in reduces if p.ranks == ranks), key=lambda p: p.bytes)
    moved = 2 * (ranks - 1) / ranks * widest[-1].bytes
    hops = 2 * (ranks - 1).bit_length()
    return Link(
        bytes_per_s=moved / widest[-1].seconds,
        latency_s=widest[0].seconds / hops,
    )
