"""Times calls as CUDA graphs, interleaved round by round, so that all see the same clock.

A GPU under load lowers its clock: what is timed a minute apart is not comparable. On a CPU the same
interface times plain calls.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from scripts.bench.harness.clock import Marks

T = TypeVar("T")
ROUNDS = 20
"""Enough for a median within 0.5 % on an H100; more only costs device time."""
_MIN_ROUNDS = 7
_MAX_SECONDS = 1.5
_WARM_ROUNDS = 2


class Sample(NamedTuple):
    median_us: float
    spread: float
    """Interquartile range over the median."""


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


class Replay(Generic[T]):
    """Calls, one a buffer set, captured as one CUDA graph (on a CPU: as they are).

    The calls must have run once before. `outputs` are kept, and written anew by every replay, so
    that no call writes where another has just written.
    """

    def __init__(self, calls: Sequence[Callable[[], T]], device: torch.device) -> None:
        self.calls = tuple(calls)
        self.outputs: list[T] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            self._capture(self._graph)
        else:
            self.replay()

    def _capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """Not `torch.cuda.graph`: that empties the allocator's cache every time."""
        stream = _capture_stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # Autograd's backward runs on threads of its own, which a global mode would refuse.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.outputs = [call() for call in self.calls]
            except BaseException:
                # Ending a broken capture raises too, and says nothing of the cause.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.synchronize()

    def replay(self) -> None:
        """Runs all calls; does not wait for the device."""
        if self._graph is not None:
            self._graph.replay()
            return
        self.outputs[:] = [call() for call in self.calls]

    def first_output(self) -> T:
        """Runs all calls; what the first buffer set's call computed."""
        self.replay()
        return self.outputs[0]


def warm_up(run: Callable[[], object], device: torch.device) -> None:
    """Runs on the capturing stream, where libraries then keep their workspaces, and waits."""
    if device.type != "cuda":
        run()
        return
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()


def time_interleaved(
    replays: Sequence[Replay[Any]], device: torch.device, rounds: int = ROUNDS
) -> list[Sample]:
    """Time of one call of each replay, over rounds in which each runs once."""
    for _ in range(_WARM_ROUNDS):
        seconds = sum(_round(replays, device).seconds())
    rounds = max(_MIN_ROUNDS, min(rounds, int(_MAX_SECONDS / max(seconds, 1e-9))))
    pending = [_round(replays, device) for _ in range(rounds)]
    by_replay = zip(*(marks.seconds() for marks in pending), strict=True)
    found = []
    for times_s, replay in zip(by_replay, replays, strict=True):
        median = statistics.median(times_s)
        low, _, high = statistics.quantiles(times_s, n=4)
        found.append(Sample(median * 1e6 / len(replay.calls), (high - low) / median))
    return found


def _round(replays: Sequence[Replay[Any]], device: torch.device) -> Marks:
    """Runs each replay once; the marks between them do not wait for the device."""
    marks = Marks(on_gpu=device.type == "cuda")
    marks.set()
    for replay in replays:
        replay.replay()
        marks.set()
    return marks
