"""Host memory that snapshots wait in until they are on the disk.

`torch.distributed.checkpoint.staging`'s StateDictStager does not serve: it keeps a copy of every
tensor that it ever saw, without a bound, pins it on the thread that trains, and overwrites it at
the next save whether or not it has been written.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_locked: set[HostMemory] = set()
"""Kept alive until they are closed: pages must not go back to the system while they are locked."""
_ALIGNMENT = 64
"""Elements: a range begins on 256 bytes."""


class Arena:
    """Gives out ranges of a fixed number of elements; knows nothing of threads or memory."""

    def __init__(self, numel: int) -> None:
        self.numel = -(-numel // _ALIGNMENT) * _ALIGNMENT
        self._held: list[range] = []
        """In ascending order."""

    def take(self, numel: int) -> range | None:
        """Returns the first free range that is large enough; None until one is given back.

        Raises:
            ValueError: if there never will be one.
        """
        if numel > self.numel:
            raise ValueError(f"numel must be at most {self.numel}, got {numel}")
        size, begin = -(-numel // _ALIGNMENT) * _ALIGNMENT, 0
        for place, held in enumerate([*self._held, range(self.numel, self.numel)]):
            if held.start - begin >= size:
                self._held.insert(place, range(begin, begin + size))
                return range(begin, begin + numel)
            begin = held.stop
        return None

    def has_room(self, numel: int) -> bool:
        """True if `take` would find a range now."""
        taken = self.take(numel) if numel <= self.numel else None
        if taken is not None:
            self.give_back(taken)
        return taken is not None

    def give_back(self, taken: range) -> None:
        """Makes a range free again."""
        self._held = [held for held in self._held if held.start != taken.start]


class HostMemory:
    """fp32 memory of the host, page-locked where a GPU copies into it.

    A thread touches and locks the pages, which takes 0.3 s a GB, while the run goes on.

    Args:
        device: of the tensors that are copied from.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self._device = device
        self._is_pinned = False
        self._thread: threading.Thread | None = None
        if device.type != "cuda" or not numel:  # the driver locks no empty memory
            self._flat = torch.empty(numel)
            return
        pages = mmap.mmap(-1, max(4 * numel, mmap.PAGESIZE))
        with suppress(OSError, AttributeError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._flat = torch.frombuffer(pages, dtype=torch.float32)[:numel]
        self._thread = threading.Thread(target=self._pin, name="tlora-pin", daemon=True)
        self._thread.start()

    def flat(self) -> torch.Tensor:
        """Returns the memory; waits until it can be used."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._flat

    def close(self) -> None:
        """Unlocks the pages; nothing may be copied any more."""
        self.flat()
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._flat.data_ptr())
            self._is_pinned = False
            _locked.discard(self)

    def _pin(self) -> None:
        """Locks the pages; a host that refuses makes saves slower, which is told once."""
        torch.cuda.set_device(self._device)  # or this thread would open the first GPU
        self._flat.numpy().fill(0)
        size_bytes = self._flat.numel() * 4
        portable = 1
        error = int(
            torch.cuda.cudart().cudaHostRegister(self._flat.data_ptr(), size_bytes, portable)
        )
        self._is_pinned = error == 0
        if not error:
            _locked.add(self)
        else:
            logger.warning(
                "%.1f GB of host memory could not be locked (CUDA error %d): rounds stand still "
                "while a job is copied for saving; a smaller run.save_memory_gb may help",
                size_bytes / 1e9, error,
            )  # fmt: skip


def save_memory_numel(sizes: list[int], memory_gb: float | None) -> int:
    """Returns how many fp32 elements the snapshots of jobs may take together.

    Args:
        sizes: elements of each job's snapshot; the largest always finds room.
        memory_gb: `run.save_memory_gb`.
    """
    allowed = _free_bytes() // 4 if memory_gb is None else memory_gb * 1e9
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    return max(max(padded, default=0), min(sum(padded), int(allowed // 4)))


def _free_bytes() -> int:
    """Memory of this host, or of its container, that is not in use."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().split("MemAvailable:")
        free = int(lines[1].split()[0]) * 1024
    with suppress(OSError, ValueError, KeyError):  # no limit reads "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        cached = int(dict(line.split() for line in lines)["inactive_file"])
        free = min(free, limit - int((group / "memory.current").read_text()) + cached)
    return max(free, 0)
