"""The actor that holds one place of a gang: it starts the rank, watches it and hands its mail on.

The rank is a plain process, the same as under every other engine: Ray's threads are not in it, it
has its own main thread for signals, and its exit code is known.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora_megatron.runtime.ranks import threads_per_rank
from tlora_megatron.service.engines.rank_process import inherited_environment
from tlora_megatron.service.mail.folder import EventReader, GangFolder, Outbox
from tlora_megatron.service.messages import Command
from tlora_megatron.service.processes import Life, ended

_TASK = ("-m", "tlora_megatron.service.engines.ray.task")
_AT_ONCE = 1000
"""Events of one answer."""


class Agent:
    """A rank's place; `post` and `events` are asked of rank 0's only.

    Args:
        path: the gang's folder.
        command: of a rank; the folder and the rank come behind it.
        environment: what the rank has beside this process's own.
        seats: places on this node, for the number of threads.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        seats: int,
    ) -> None:
        self._folder = GangFolder.at(Path(path))
        self._rank = rank
        self._command = [*command, path, str(rank)]
        self._environment = self._of_rank(environment, seats)
        self._events = EventReader(self._folder)
        self._outbox: Outbox | None = None
        self._is_over = threading.Event()
        self._code: int | None = None
        self._folder.write(f"place_{rank}.json", f'{{"namespace": "{namespace()}"}}')
        # The kernel ends the rank with the thread that has started it.
        threading.Thread(target=self._live, daemon=True).start()

    def post(self, line: str) -> None:
        """Leaves a command for rank 0; the same one again changes nothing."""
        self._outbox = self._outbox or Outbox(self._folder)
        self._outbox.post(Command.from_json(line))

    def events(self, since: int) -> list[str]:
        """The gang's events behind a number."""
        return [event.to_json() for event in self._events.after(since)[:_AT_ONCE]]

    def watch(self, seconds: float) -> dict[str, int | None] | None:
        """Waits so long for the rank's end: `{"code": exit code}`, or None."""
        return {"code": self._code} if self._is_over.wait(seconds) else None

    def _live(self) -> None:
        try:
            log = os.open(
                self._folder.log(self._rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
            )
            with os.fdopen(log, "wb") as output:
                process = subprocess.Popen(
                    [sys.executable, *_TASK, str(os.getpid()), *self._command],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self._code = process.wait()
        finally:
            self._is_over.set()

    def _of_rank(self, given: Mapping[str, str], seats: int) -> dict[str, str]:
        """The rank's environment: Ray has chosen the GPU, and one thread, which is not meant."""
        environment = {**inherited_environment(), **given}
        environment.setdefault("CUDA_VISIBLE_DEVICES", "")
        if "OMP_NUM_THREADS" not in given:
            environment["OMP_NUM_THREADS"] = threads_per_rank(seats)
        return environment


def reap(path: str, ranks: Sequence[int], wait_s: float) -> list[int]:
    """Ends ranks of a gang that run on this node; returns those that are proved to be gone.

    Nothing is proved of ranks that sit on other nodes, or in other containers of this one.
    """
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
    life = Life.known_as(pid.read_text())
    life.kill()
    is_over = life.is_over or bool(ended([life], wait_s))
    life.close()
    return is_over


def namespace() -> str:
    """Where a process id means the same process: the boot of a host, and the container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
