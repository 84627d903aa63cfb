"""Processes of a service that are forks of this one, where it has everything imported already."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tlora_megatron.service import supervisor
from tlora_megatron.service.engines.local import COMMAND as WORKER
from tlora_megatron.service.prepare import worker as prepare
from tlora_megatron.service.prepare.pool import COMMAND as PREPARE
from tlora_megatron.service.worker import preforked


def install() -> None:
    """Has this process fork pre-forked workers, and the ones that validate jobs: no imports."""
    supervisor.start_process = _start  # type: ignore[assignment,misc]


def _start(command: Sequence[str], **how: Any) -> Any:
    known, forks = tuple(command), "--forks" in command
    work: Callable[[], object]
    if known[: len(WORKER)] == WORKER:
        work = lambda: preforked.serve_orders(forks=forks)  # noqa: E731
    elif known == tuple(PREPARE):
        work = prepare.main
    else:
        return subprocess.Popen(command, **how)
    ends = (how["stdin"], how["stdout"], 2 if how["stderr"] is None else how["stderr"])
    return ForkedProcess(work, how["env"], ends)


class ForkedProcess:
    """The part of `subprocess.Popen` that a service uses.

    Args:
        work: carried out in the fork, which then ends.
        ends: descriptors of its stdin, stdout and stderr.
    """

    def __init__(
        self, work: Callable[[], object], environment: Mapping[str, str], ends: Sequence[int]
    ) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                for source, target in zip(ends, range(3), strict=True):
                    os.dup2(source, target)
                _close_pipes()
                os.environ.clear()
                os.environ.update(environment)
                work()
            finally:
                os._exit(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        code = self._look(0)
        assert code is not None, "it has been waited for"
        return code

    def _look(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _close_pipes() -> None:
    """Closes what else leads to the pipes of stdin and stdout: their ends must be seen."""
    own = {os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in (0, 1)}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the listing
            if descriptor > 1 and os.readlink(f"/proc/self/fd/{descriptor}") in own:
                os.close(descriptor)
