"""What all engines share: how a rank is started, and how a gang has ended."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora_megatron.runtime.ranks import describe_death, threads_per_rank
from tlora_megatron.service.messages import GangEvent, GangFolder
from tlora_megatron.service.supervisor import last_words

Cursor = Mapping[tuple[str, int], int]
"""Number of the last event that was read, by gang and epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GangInfo:
    """A gang that an engine knows."""

    gang: str
    epoch: int
    alive: bool
    """True while all its processes are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """A machine that can hold gangs."""

    node: int
    address: str
    gpus: int
    """GPUs, or worker slots on a machine without any."""
    healthy: bool = True


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


_SENT = (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
"""Signals that somebody sends; others come from what a process did itself."""


def blame(folder: GangFolder, codes: Mapping[int, int | None]) -> dict[str, Any]:
    """The body of `died` for ranks that are gone, with their exit codes where they are known.

    Ranks that only lost their connection are not to blame while another one is.
    """
    endings = {rank: _ending(folder, rank, code) for rank, code in codes.items()}
    rank, ending = min(
        endings.items(), key=lambda item: (item[1]["is_lost"], item[1]["at"], item[0])
    )
    words = {key: ending[key] for key in ("reason", "out_of_memory", "newcomers")}
    if ending.get("was_killed"):
        words["was_killed"] = True
    return {"rank": rank, **words}


def say_died(folder: GangFolder, body: Mapping[str, Any]) -> None:
    """Writes a gang's last event, unless it did so itself; none of its processes may be left."""
    log = folder.events()
    last = log.last()
    if last is not None and last.kind in ("died", "stopped"):
        return
    newcomers = body.get("newcomers", [])
    event = GangEvent(
        gang=folder.gang,
        epoch=folder.epoch,
        number=last.number + 1 if last else 1,
        at=time.time(),
        kind="died",
        job=newcomers[0] if len(newcomers) == 1 else None,
        body={"out_of_memory": False, "newcomers": [], **body},
    )
    log.append(event, durable=True)


def _ending(folder: GangFolder, rank: int, code: int | None) -> dict[str, Any]:
    own = folder.read_json(f"end_{rank}.json")
    if own is not None:
        return dict(own)
    reason = _describe(folder, rank, code)
    return {
        "reason": reason,
        "out_of_memory": False,
        "newcomers": [],
        "is_lost": code == 0,
        "was_killed": code is None or -code in _SENT,
        "at": 0.0,
    }


def _describe(folder: GangFolder, rank: int, code: int | None) -> str:
    if code is not None and code < 0:
        text = describe_death(rank, -code)
    elif code is None:
        text = f"rank {rank} has ended without a word, as SIGKILL ends processes"
    else:
        text = f"rank {rank} ended with exit code {code}"
    last = last_words(folder.log(rank))
    return f"{text}; the last line of its log: {last}" if last else text
