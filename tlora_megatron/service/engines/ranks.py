"""How every engine starts a rank: the command, its environment, and the slot that it gets."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tlora_megatron.runtime.ranks import threads_per_rank

RANK_COMMAND = (sys.executable, "-m", "tlora_megatron.service.worker.rank")
"""Behind it come the gang's folder and the rank."""
HOST_VARIABLE = "TLORA_GANG_HOST"
"""Tells rank 0 its own address for the others, where a gang spans several nodes."""
_OF_OTHER_WORLDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "GROUP_")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")
"""The driver's names of GPUs in /dev; a container sees those that it was given."""


def inherited_environment() -> dict[str, str]:
    """This process's environment without what a launcher of other processes has left there."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHER_WORLDS)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSlots:
    """The GPUs or cores of this host that ranks may use."""

    devices: tuple[str, ...]
    """The value of CUDA_VISIBLE_DEVICES for each GPU; empty on a host without any."""
    count: int
    """Ranks that find room: one a GPU, or what was asked for where there is none."""

    @classmethod
    def of_host(cls, gpus: int | None, slots: int | None) -> WorkerSlots:
        """Takes stock without starting CUDA.

        Args:
            gpus: how many of those that this process may see; None = all, 0 = none.
            slots: on a host without GPUs; None = one a core.

        Raises:
            ValueError: if there are fewer GPUs.
        """
        visible = _visible_devices()
        if gpus is not None and gpus > len(visible):
            raise ValueError(f"--gpus must be at most {len(visible)} on this host, got {gpus}")
        devices = visible if gpus is None else visible[:gpus]
        cores = len(os.sched_getaffinity(0))
        return cls(devices=devices, count=len(devices) or slots or cores)

    def environment(self, slot: int) -> dict[str, str]:
        """Returns the variables of a rank in a slot, beside those of the service.

        The number of threads depends on the host alone: sums of a CPU's threads depend on it.
        """
        threads = os.environ.get("OMP_NUM_THREADS") or threads_per_rank(self.count)
        device = self.devices[slot] if self.devices else ""
        # numpy's BLAS starts its threads when it is imported, and a process with threads cannot be
        # forked: on a host with more cores than slots no pre-forked worker would stand.
        return {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "1", _VISIBLE: device}


def _visible_devices() -> tuple[str, ...]:
    given = os.environ.get(_VISIBLE)
    if given is not None:
        return tuple(word.strip() for word in given.split(",") if word.strip() not in ("", "-1"))
    count = sum(_DEVICE.fullmatch(path.name) is not None for path in Path("/dev").iterdir())
    return tuple(map(str, range(count)))
