"""Times of collectives and GEMMs on two streams of one GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_IN_A_ROW, _ROUNDS = 6, 5
_HEAD_START_CYCLES = 4_000_000
"""Over 2 ms of an H200, in which the host enqueues all calls of a round."""


class Timer:
    """Median times of calls in a row, the slowest process's."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream(priority=-1)

    def alone(self, call: Callable[[], object]) -> float:
        """Microseconds of one call, on the side stream."""
        return self._median(lambda: self._on_side(call, None), _renewal(call))[0]

    def compute(self, piece: Callable[[], object]) -> float:
        """Microseconds of the GEMMs."""
        return self._median(lambda: self._on_side(None, piece))[0]

    def both(self, call: Callable[[], object], piece: Callable[[], object]) -> tuple[float, float]:
        """Microseconds of both beside each other, and until the GEMMs alone were done."""
        both, gemms = self._median(lambda: self._on_side(call, piece), _renewal(call))
        return both, gemms

    def host(self, call: Callable[[], object]) -> float:
        """Microseconds that the host takes to enqueue a call."""
        spent = []
        for _ in range(_ROUNDS):
            torch.cuda.synchronize()
            dist.barrier()
            with torch.cuda.stream(self._side):
                torch.cuda._sleep(_HEAD_START_CYCLES)
                begin = time.perf_counter()
                for _ in range(_IN_A_ROW):
                    call()
                spent.append((time.perf_counter() - begin) * 1e6 / _IN_A_ROW)
        torch.cuda.synchronize()
        return _slowest([statistics.median(spent)] * 2)[0]

    def _on_side(
        self, call: Callable[[], object] | None, piece: Callable[[], object] | None
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        main = torch.cuda.current_stream()
        begin.record()
        if call is not None:
            self._side.wait_stream(main)
            with torch.cuda.stream(self._side):
                call()
        if piece is not None:
            piece()
        end.record()
        main.wait_stream(self._side)
        return begin, end

    def _median(
        self,
        run: Callable[[], tuple[torch.cuda.Event, torch.cuda.Event]],
        renew: Callable[[], object] = lambda: None,
    ) -> tuple[float, float]:
        run()
        whole, inner = [], []
        for _ in range(_ROUNDS):
            renew()
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HEAD_START_CYCLES)
            begin.record()
            marks = [run() for _ in range(_IN_A_ROW)]
            end.record()
            end.synchronize()
            whole.append(begin.elapsed_time(end) * 1e3 / _IN_A_ROW)
            inner.append(sum(b.elapsed_time(e) for b, e in marks) * 1e3 / _IN_A_ROW)
        return _slowest([statistics.median(whole), statistics.median(inner)])


def _renewal(call: Callable[[], object]) -> Callable[[], object]:
    return getattr(call, "renew", lambda: None)


def _slowest(values: list[float]) -> tuple[float, float]:
    tensor = torch.tensor(values, device="cuda", dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    first, second = tensor.tolist()
    return first, second
