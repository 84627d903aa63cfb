"""Copies from the host to a GPU through a few page-locked buffers, beside what the GPU computes."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch

from tlora_megatron.layers.slab import Fill

_BUFFERS, _BUFFER_NUMEL = 12, 1 << 21
"""96 MB in all: a buffer for each thread that reads, and some on their way. A round fills the GPU's
queue, and a copy that is begun then waits for room in it (60 ms on an H200): few large ones."""


class _Buffer(NamedTuple):
    memory: torch.Tensor
    copied: torch.cuda.Event
    """The GPU has what was last put there."""


class LockedRing:
    """Copies values of the host to a GPU on a stream of its own; any thread may copy.

    Its buffers are locked once. Locking memory stops the whole device, and torch would lock other
    sizes for other jobs and keep them all.

    Args:
        memory: fp32 `[buffers, elements]`, page-locked.
    """

    def __init__(self, stream: torch.cuda.Stream, memory: torch.Tensor) -> None:
        self.stream = stream
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        """The one that was used longest ago comes first."""
        for row in memory:
            self._free.put(_Buffer(row, torch.cuda.Event(blocking=True)))
        self.numel = memory.shape[1]
        """Elements that one copy brings at most."""

    @classmethod
    def on(cls, device: torch.device) -> LockedRing:
        """Locks the memory, for copies to a GPU."""
        memory = torch.empty(_BUFFERS, _BUFFER_NUMEL, pin_memory=True)
        return cls(torch.cuda.Stream(device), memory)

    def copy(self, target: torch.Tensor, fill: Fill) -> None:
        """Begins to copy what is filled in into flat fp32 memory of the GPU.

        Waits for the GPU where it has not taken the buffers' last values yet.
        """
        if target.numel() <= self.numel:
            self._copy_part(target, fill)
            return
        values = torch.empty(target.numel())
        fill(values)
        for into, part in zip(target.split(self.numel), values.split(self.numel), strict=True):
            self._copy_part(into, partial(_copy, part))

    def _copy_part(self, target: torch.Tensor, fill: Fill) -> None:
        buffer = self._free.get()
        try:
            buffer.copied.synchronize()
            locked = buffer.memory[: target.numel()]
            fill(locked)
            with torch.cuda.stream(self.stream):
                target.copy_(locked, non_blocking=True)
                buffer.copied.record(self.stream)
        finally:
            self._free.put(buffer)


def _copy(values: torch.Tensor, room: torch.Tensor) -> None:
    room.numpy()[:] = values.numpy()
