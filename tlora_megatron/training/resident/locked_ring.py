"""Copies from the host to a GPU through a few page-locked buffers, beside what the GPU computes."""

from __future__ import annotations

from queue import SimpleQueue
from typing import NamedTuple

import torch

_BUFFERS, _BUFFER_NUMEL = 8, 1 << 21
"""64 MB in all: one buffer for each thread that reads; a factor of an 8B model fits into one."""


class _Buffer(NamedTuple):
    memory: torch.Tensor
    copied: torch.cuda.Event
    """The GPU has what was last put there."""


class LockedRing:
    """Copies tensors of the host to a GPU on a stream of its own; any thread may copy.

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
        self._numel = memory.shape[1]

    @classmethod
    def on(cls, device: torch.device) -> LockedRing:
        """Locks the memory, for copies to a GPU."""
        memory = torch.empty(_BUFFERS, _BUFFER_NUMEL, pin_memory=True)
        return cls(torch.cuda.Stream(device), memory)

    def copy(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Begins to copy values into fp32 memory of the GPU, contiguous; they may go afterwards.

        Waits for the GPU where it has not taken the buffers' last values yet.
        """
        parts = zip(
            target.view(-1).split(self._numel), values.reshape(-1).split(self._numel), strict=True
        )
        for into, part in parts:
            self._copy_part(into, part)

    def _copy_part(self, target: torch.Tensor, values: torch.Tensor) -> None:
        buffer = self._free.get()
        try:
            buffer.copied.synchronize()
            locked = buffer.memory[: values.numel()].copy_(values)
            with torch.cuda.stream(self.stream):
                target.copy_(locked, non_blocking=True)
                buffer.copied.record(self.stream)
        finally:
            self._free.put(buffer)
