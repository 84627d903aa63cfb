"""The actor that holds one place of a gang: it starts the rank and watches it.

The rank is a plain process, the same as under every other engine: Ray's threads are not in it, it
has its own main thread for signals, and its exit code is known.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora_megatron.runtime.ranks import threads_per_rank
from tlora_megatron.service.engines.protocol import inherited_environment
from tlora_megatron.service.messages import GangFolder
from tlora_megatron.service.supervisor import Child, ProcessHandle, ended

_TASK = ("-m", "tlora_megatron.service.engines.ray.task")


class Agent:
    """The place of one rank; folder and rank come behind `command`, `slots` is for its threads."""

    def __init__(
        self,
        path: str,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        slots: int,
    ) -> None:
        self._folder = GangFolder.at(Path(path))
        self._rank = rank
        self._command = [*command, path, str(rank)]
        # Ray has chosen the GPU, and one thread, which is not meant.
        self._environment = {**inherited_environment(), **environment}
        self._environment.setdefault("CUDA_VISIBLE_DEVICES", "")
        if "OMP_NUM_THREADS" not in environment:
            self._environment["OMP_NUM_THREADS"] = threads_per_rank(slots)
        self._is_over = threading.Event()
        self._code: int | None = None
        self._folder.write(f"place_{rank}.json", f'{{"namespace": "{namespace()}"}}')
        # The kernel ends the rank with the thread that has started it.
        threading.Thread(target=self._live, daemon=True).start()

    def watch(self, seconds: float) -> dict[str, int | None] | None:
        """Waits so long for the rank's end: `{"code": exit code}`, or None."""
        return {"code": self._code} if self._is_over.wait(seconds) else None

    def _live(self) -> None:
        try:
            child = Child(
                [sys.executable, *_TASK, str(os.getpid()), *self._command],
                environment=self._environment,
                log=self._folder.log(self._rank),
            )
            self._code = child.wait()
            child.close()
        finally:
            self._is_over.set()


def reap(path: str, ranks: Sequence[int], wait_s: float) -> list[int]:
    """Ends a gang's ranks on this node; returns those that are proved to be gone."""
    folder, here = GangFolder.at(Path(path)), namespace()
    proved = []
    for rank in ranks:
        place: Any = folder.read_json(f"place_{rank}.json")
        if place is None or (place["namespace"] == here and _is_over(folder.pid(rank), wait_s)):
            proved.append(rank)  # without a place its actor has not begun: the folder is closed
    return proved


def _is_over(pid: Path, wait_s: float) -> bool:
    """Ends the process that has left word of itself; one that has not will find it closed."""
    if not pid.exists():
        return True
    handle = ProcessHandle.known_as(pid.read_text())
    handle.kill()
    is_over = handle.is_over or bool(ended([handle], wait_s))
    handle.close()
    return is_over


def namespace() -> str:
    """Where a process id means the same process: the boot of a host, and the container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
