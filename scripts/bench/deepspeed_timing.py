"""What steps under DeepSpeed take: seconds, tokens, memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class Timing(NamedTuple):
    """What all steps of a provider took."""

    seconds: float
    tokens: int
    peak_bytes: int


class Watch:
    """Runs from when all processes and the device have come to it."""

    def __init__(self) -> None:
        _wait_for_device()
        dist.barrier()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._begin = time.perf_counter()

    def timing(self, tokens: int) -> Timing:
        """Until now, for so many tokens. Waits for the device."""
        _wait_for_device()
        seconds = time.perf_counter() - self._begin
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return Timing(seconds, tokens, peak)


def total(timings: Sequence[Timing]) -> Timing:
    """Of runs one after another."""
    seconds, tokens, peaks = zip(*timings, strict=True)
    return Timing(sum(seconds), sum(tokens), max(peaks))


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
