"""Where the processes of this host's gangs sit: GPUs, or seats at its cores."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tlora_megatron.runtime.ranks import threads_per_rank

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")
"""The driver's names of GPUs in /dev; a container sees those that it was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seats:
    """The GPUs or cores of this host that gangs may use."""

    devices: tuple[str, ...]
    """The value of CUDA_VISIBLE_DEVICES for each GPU; empty on a host without any."""
    count: int
    """GPUs, or seats."""

    @classmethod
    def of_host(cls, gpus: int | None, seats: int | None) -> Seats:
        """Takes stock without starting CUDA.

        Args:
            gpus: how many of those that this process may see; None = all, 0 = none.
            seats: on a host without GPUs; None = one a core.

        Raises:
            ValueError: if there are fewer GPUs.
        """
        visible = _visible_devices()
        if gpus is not None and gpus > len(visible):
            raise ValueError(f"--gpus must be at most {len(visible)} on this host, got {gpus}")
        devices = visible if gpus is None else visible[:gpus]
        cores = len(os.sched_getaffinity(0))
        return cls(devices=devices, count=len(devices) or seats or cores)

    def environment(self, seat: int) -> dict[str, str]:
        """Returns the variables of a process at a seat, beside those of the service.

        The number of threads depends on the host alone: sums of a CPU's threads depend on it.
        """
        threads = os.environ.get("OMP_NUM_THREADS") or threads_per_rank(self.count)
        device = self.devices[seat] if self.devices else ""
        # numpy's BLAS starts its threads when it is imported, and a process with threads cannot be
        # forked: on a host with more cores than seats no spare of ranks would stand.
        return {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "1", _VISIBLE: device}


def _visible_devices() -> tuple[str, ...]:
    given = os.environ.get(_VISIBLE)
    if given is not None:
        return tuple(word.strip() for word in given.split(",") if word.strip() not in ("", "-1"))
    count = sum(_DEVICE.fullmatch(path.name) is not None for path in Path("/dev").iterdir())
    return tuple(map(str, range(count)))
