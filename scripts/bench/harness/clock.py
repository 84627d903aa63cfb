"""Clocks of the benchmarks, and what the processes of one agree on."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class Marks:
    """Points in time on the current CUDA stream, or of the host's clock."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._events: list[torch.cuda.Event] = []
        self._times_s: list[float] = []

    def set(self) -> None:
        """Adds a mark; does not wait for the device."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times_s.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between one mark and the next. Waits for the last one."""
        if not self._on_gpu:
            return [end - begin for begin, end in itertools.pairwise(self._times_s)]
        self._events[-1].synchronize()
        pairs = itertools.pairwise(self._events)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


class Timing(NamedTuple):
    """Time, tokens and memory of a number of steps."""

    seconds: float
    """All steps together, from one wait for the device to the next."""
    steps: int
    tokens: int
    """Rows of real data, padding not counted."""
    peak_bytes: int
    step_times_s: tuple[float, ...] = ()
    """Time of each step, where the steps were marked."""

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    def percentile_s(self, percent: int) -> float:
        """A percentile (a multiple of 10) of the steps' times; NaN if they were not marked."""
        if len(self.step_times_s) < 2:
            return self.step_times_s[0] if self.step_times_s else float("nan")
        return statistics.quantiles(self.step_times_s, n=10)[percent // 10 - 1]


class Watch:
    """A stopwatch that starts once all processes and the device have come to it."""

    def __init__(self) -> None:
        wait_for_all()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._begin = time.perf_counter()

    def timing(self, *, steps: int, tokens: int = 0) -> Timing:
        """Time since the start. Waits for the device."""
        wait_for_device()
        return Timing(time.perf_counter() - self._begin, steps, tokens, peak_bytes())


def timed(run: Callable[[], object], warmup: int, repeats: int) -> Timing:
    """Runs steps back to back and waits at the end; the caller counts the tokens."""
    for _ in range(warmup):
        run()
    watch, marks = Watch(), Marks(on_gpu=torch.cuda.is_available())
    marks.set()
    for _ in range(repeats):
        run()
        marks.set()
    timing = watch.timing(steps=repeats)
    return timing._replace(step_times_s=tuple(marks.seconds()))


def total(timings: Sequence[Timing]) -> Timing:
    """The sum of runs one after another, with the largest peak of memory."""
    return Timing(
        seconds=sum(timing.seconds for timing in timings),
        steps=sum(timing.steps for timing in timings),
        tokens=sum(timing.tokens for timing in timings),
        peak_bytes=max(timing.peak_bytes for timing in timings),
    )


def wait_for_device() -> None:
    """Waits until the device has done all its work; returns at once without CUDA."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wait_for_all() -> None:
    """Waits for the device, then for the other processes."""
    wait_for_device()
    if dist.is_initialized():
        dist.barrier()


def peak_bytes() -> int:
    """The most memory that this process's tensors took since the peak was reset; 0 without CUDA."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def allocated() -> int:
    """The memory that this process's tensors take now; 0 without CUDA."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def release() -> None:
    """Gives the allocator's cache back, and says what is still held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        if held > 2**30:
            say(f"memory still held: {held / 2**30:.1f} GiB")


def is_main() -> bool:
    """True on the first process, which prints and writes rows."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    if is_main():
        print(text, flush=True)


def out_of_time(begin: float, budget_s: float) -> bool:
    """True once so many seconds have passed since `begin`, by the first process's clock."""
    answer = [time.monotonic() - begin > budget_s]
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    return answer[0]


def largest(values: list[float]) -> list[float]:
    return _reduced(values, dist.ReduceOp.MAX)


def summed(values: list[float]) -> list[float]:
    return _reduced(values, dist.ReduceOp.SUM)


def _reduced(values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op)
    return tensor.tolist()
