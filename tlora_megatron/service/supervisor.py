"""Processes: those that the service starts, and others of this host, told apart and watched."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal, Self

from tlora_megatron.channel import LinePipe

_FLAGS, _START = 6, 19
"""Words of /proc/PID/stat behind the process's name."""
_PF_EXITING = 4
"""Set by the kernel as soon as a process begins to end."""
_TAIL_BYTES = 4096
_GRACE_S = 5.0
_LOOK_S = 0.01


class ProcessHandle:
    """One process from now to its end, however often its number is given to another one.

    Its descriptor becomes readable at the end of the process, which need not be a child of this
    one.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self._is_over = False

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The handle of a process; None if there is none."""
        with suppress(ProcessLookupError):
            return cls(pid, os.pidfd_open(pid))
        return None

    @classmethod
    def known_as(cls, identity: str) -> Self:
        """The handle of the process, maybe over, that `identity_of` has described so."""
        pid = int(identity.split()[0])
        handle = cls.of(pid)
        if handle is None or identity_of(pid) != identity:
            if handle is not None:
                handle.close()
            return cls.over()
        return handle

    @classmethod
    def over(cls) -> Self:
        """The handle of a process of which nothing is left."""
        handle = cls(0, -1)
        handle._is_over = True
        return handle

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
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, to this process only."""
        if self._descriptor >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def fileno(self) -> int:
        """The descriptor, for `select.poll`."""
        return self._descriptor

    def close(self) -> None:
        """Gives the descriptor back; what was seen stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def ended(handles: Sequence[ProcessHandle], wait_s: float = 0.0) -> list[ProcessHandle]:
    """Those whose end is seen now, after waiting so long at most for the first; not closed ones."""
    poll = select.poll()
    by_descriptor = {handle.fileno(): handle for handle in handles if handle.fileno() >= 0}
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


class Child:
    """A process that the service has started, in a session of its own.

    Args:
        log: what it prints is appended there; None = only its errors go where this process's go.
        wire: `lines` = its stdin and stdout are a `LinePipe`; `stdin` = only its stdin is one,
        which it sees closed when this process ends; `none` = its stdin is empty.
        environment, umask: None = as this process's.

    Raises:
        OSError: if it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        wire: Literal["none", "stdin", "lines"] = "none",
        pass_fds: Sequence[int] = (),
        umask: int | None = None,
    ) -> None:
        self.log = log
        with _ends(log, wire) as (stdin, stdout, stderr, kept):
            self._process = start_process(
                command,
                env=environment,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                umask=-1 if umask is None else umask,
                start_new_session=True,  # Ctrl-C is for the service, which ends its processes
            )
            self._pipe = None if kept is None else LinePipe(*kept)
        handle = ProcessHandle.of(self._process.pid)
        assert handle is not None, "a child that nobody has waited for is there"
        self.handle = handle

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pipe(self) -> LinePipe:
        """The pipe to it, if it was started with one."""
        assert self._pipe is not None, "it must have been started with a pipe"
        return self._pipe

    @property
    def exit_code(self) -> int | None:
        """How it ended, -n by signal n; None while it lives."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """The last line of its log that is not empty."""
        return "" if self.log is None else last_words(self.log)

    def wait(self) -> int:
        """Waits for its end; returns how it ended."""
        return self._process.wait()

    async def ended(self) -> int:
        """Waits for its end; returns how it ended."""
        import asyncio  # not at the top: ranks, which have no use for it, import this file

        while (code := self.exit_code) is None:
            await asyncio.sleep(_LOOK_S)
        return code

    def kill(self) -> int:
        """Ends it at once, and closes what leads to it."""
        self.handle.kill()
        code = self.wait()
        self.close()
        return code

    def end(self, grace_s: float = _GRACE_S) -> int:
        """Ends it by the end of its stdin, then by SIGTERM, then by SIGKILL."""
        if self._pipe is not None:
            self._pipe.hang_up()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self.handle.send(number)
            if self.exit_code is not None or ended([self.handle], grace_s):
                break
        return self.kill()

    def close(self) -> None:
        """Closes what leads to it; it goes on, unless it ends with its stdin."""
        if self._pipe is not None:
            self._pipe.close()
        self.handle.close()


start_process = subprocess.Popen
"""Starts a process; tests put forks in its place."""


@contextmanager
def _ends(
    log: Path | None, wire: str
) -> Iterator[tuple[int, int, int | None, tuple[int | None, int] | None]]:
    """Yields stdin, stdout and stderr of a child, and this process's ends of its pipes."""
    with ExitStack() as given, ExitStack() as kept:
        stdin, stdout, stderr = subprocess.DEVNULL, subprocess.DEVNULL, None
        ends: tuple[int | None, int] | None = None
        if log is not None:
            stdout = stderr = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            given.callback(os.close, stdout)
        if wire != "none":
            stdin, writing = os.pipe()
            given.callback(os.close, stdin)
            kept.callback(os.close, writing)
            ends = (None, writing)
        if wire == "lines":
            reading, stdout = os.pipe()
            given.callback(os.close, stdout)
            kept.callback(os.close, reading)
            ends = (reading, writing)
        yield stdin, stdout, stderr, ends
        kept.pop_all()


def last_words(log: Path) -> str:
    """The last line of a process's log that is not empty."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def package_path() -> str:
    """PYTHONPATH with which other processes import the same package."""
    mine = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH")
    return mine if not rest else os.pathsep.join([mine, rest])


def available_memory_bytes() -> int:
    """Memory of this host that new processes can get."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0
