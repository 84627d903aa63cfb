"""Processes with everything imported that wait to become ranks."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tlora_megatron.service.engines.endings import last_words
from tlora_megatron.service.engines.local.seats import Seats
from tlora_megatron.service.mail.folder import GangFolder
from tlora_megatron.service.processes import Life, available_memory_bytes

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "tlora_megatron.service.worker.standby")
_SPARE_BYTES = 3 << 29
"""Memory that must be free for each: one with a GPU's build of torch takes 0.5 GB."""


class Spare:
    """One waiting process, which ends with this one unless it has been given an order."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as output:
            self.process = self.open_process(command, environment, output)
        life = Life.of(self.process.pid)
        assert life is not None, "a child that nobody has waited for has a life"
        self.life = life
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._is_ready = False

    @staticmethod
    def open_process(
        command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Starts the process, in a session of its own; pipes are its stdin and stdout."""
        return subprocess.Popen(
            command,
            bufsize=0,  # an order that nobody takes must not wait for the pipe to be closed
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )

    @property
    def is_ready(self) -> bool:
        """True once it has everything imported."""
        if not self._is_ready:
            assert self.process.stdout is not None
            self._is_ready = bool(self.process.stdout.read())
        return self._is_ready

    def order(self, folder: GangFolder, rank: int, environment: Mapping[str, str]) -> bool:
        """Has it become, or fork, a rank; False if it is not there any more."""
        line = {"folder": str(folder.path), "rank": rank, "env": dict(environment)}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def close(self) -> None:
        """Closes the pipes: it ends unless it has become a rank."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def end(self) -> None:
        """Ends it at once."""
        self.life.kill()
        self.process.wait()
        self.close()
        self.life.close()


class Spares:
    """One spare for each of the first GPUs; on a host without any, one that forks.

    Args:
        count: None = as many as there are seats and memory for; 0 = none.
    """

    def __init__(
        self,
        folder: Path,
        seats: Seats,
        environment: Mapping[str, str],
        count: int | None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._folder = folder
        self._seats = seats
        self._environment = environment
        self._command = tuple(command)
        wanted = seats.count if count is None else min(count, seats.count)
        if count is None:
            wanted = min(wanted, available_memory_bytes() // _SPARE_BYTES)
        self._wanted = wanted if seats.devices else min(wanted, 1)
        self.by_seat: dict[int, Spare] = {}
        """The processes that wait, each at its seat; one that forks at 0."""

    @property
    def forks(self) -> bool:
        """True if one spare serves all seats."""
        return not self._seats.devices

    def take(self, seat: int) -> Spare | None:
        """The spare for a rank at a seat; one that does not fork is the caller's now."""
        if self.forks:
            return self._living(0)
        spare = self._living(seat)
        return None if spare is None else self.by_seat.pop(seat)

    def replenish(self) -> None:
        """Starts what is missing, a few at a time: imports are work for every core."""
        missing = [seat for seat in range(self._wanted) if self._living(seat) is None]
        starting = sum(not spare.is_ready for spare in self.by_seat.values())
        room = max(1, len(os.sched_getaffinity(0)) // 2) - starting
        if not self._wanted:  # given up a moment ago
            return
        for seat in missing[: max(0, room)]:
            environment = {**self._environment, **self._seats.environment(seat)}
            command = [*self._command, *(["--forks"] if self.forks else [])]
            self.by_seat[seat] = Spare(command, environment, self._log(seat))

    def close(self) -> None:
        """Ends all that wait."""
        for spare in self.by_seat.values():
            spare.end()
        self.by_seat.clear()

    def _log(self, seat: int) -> Path:
        return self._folder / f"spare_{seat}.log"

    def _give_up(self, seat: int) -> None:
        """Starts no more spares: ranks that start by themselves say what is wrong."""
        self._wanted = 0
        words = last_words(self._log(seat))
        logger.error("gangs start without spare processes, one of which failed: %s", words)

    def _living(self, seat: int) -> Spare | None:
        spare = self.by_seat.get(seat)
        if spare is not None and spare.life.is_over:
            del self.by_seat[seat]
            if not spare.is_ready:
                self._give_up(seat)
            spare.end()
            return None
        return spare
