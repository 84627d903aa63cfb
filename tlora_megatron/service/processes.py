"""Processes of this host that may be nobody's children: told apart, watched and killed."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

_FLAGS, _START = 6, 19
"""Words of /proc/PID/stat behind the process's name."""
_PF_EXITING = 4
"""Set by the kernel as soon as a process begins to end."""


class Life:
    """One process from now to its end, however often its number is given to another one.

    Its descriptor can be waited for; it becomes readable at the end of the process, which need not
    be a child of this one.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self._is_over = False

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The life of a process; None if there is none."""
        with suppress(ProcessLookupError):
            return cls(pid, os.pidfd_open(pid))
        return None

    @classmethod
    def known_as(cls, identity: str) -> Self:
        """The life, maybe over, of the process that `identity_of` has described so."""
        pid = int(identity.split()[0])
        life = cls.of(pid)
        if life is None or identity_of(pid) != identity:
            if life is not None:
                life.close()
            return cls.over()
        return life

    @classmethod
    def over(cls) -> Self:
        """A life of which nothing is left."""
        life = cls(0, -1)
        life._is_over = True
        return life

    @property
    def is_over(self) -> bool:
        """True once the process has ended, whether or not anybody has asked how."""
        if not self._is_over and ended([self]):
            self._is_over = True
        return self._is_over

    @property
    def is_ending(self) -> bool:
        """True once the process runs no more; a GPU's driver then takes a second to clear up."""
        if self._descriptor < 0 or self.is_over:
            return True
        words = _stat(self.pid)
        return words is None or bool(int(words[_FLAGS]) & _PF_EXITING)

    def kill(self) -> None:
        """Ends the process by SIGKILL; one that has ended stays so."""
        if self._descriptor >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def fileno(self) -> int:
        """The descriptor, for `select.poll`."""
        return self._descriptor

    def close(self) -> None:
        """Gives the descriptor back; what was seen stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def ended(lives: Sequence[Life], wait_s: float = 0.0) -> list[Life]:
    """Those whose end is seen now, after waiting so long at most for the first; not closed ones."""
    poll = select.poll()
    by_descriptor = {life.fileno(): life for life in lives if life.fileno() >= 0}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(1000 * wait_s)]


def identity_of(pid: int | str = "self") -> str | None:
    """Process id, start time and boot in one line: no other process ever has the same."""
    words = _stat(pid)
    if words is None:
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.getpid() if pid == 'self' else pid} {words[_START]} {boot}"


def _stat(pid: int | str) -> list[str] | None:
    """The words of /proc/PID/stat behind the name; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def available_memory_bytes() -> int:
    """Memory of this host that new processes can get."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0
