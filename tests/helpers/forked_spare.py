"""Processes of a service that are forks of this one, where it has everything imported already."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tlora_megatron.service.engines.local.spares import Spare
from tlora_megatron.service.prepare import pool, worker
from tlora_megatron.service.worker import standby


def install() -> None:
    """Has engines of this process fork their spares, which costs no import."""
    Spare.open_process = staticmethod(_open_spare)  # type: ignore[method-assign,assignment]


def install_pool() -> None:
    """Has this process fork the ones that validate jobs."""
    pool._Worker.open_process = staticmethod(_open_worker)  # type: ignore[method-assign,assignment]


def _open_spare(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> ForkedProcess:
    forks = "--forks" in command
    return ForkedProcess(lambda: standby.serve_orders(forks=forks), environment, output.fileno())


def _open_worker(environment: Mapping[str, str]) -> ForkedProcess:
    return ForkedProcess(worker.main, environment, 2)


class ForkedProcess:
    """The part of `subprocess.Popen` that a service uses.

    Args:
        work: carried out in the fork, which then ends.
        output: descriptor of its stderr.
    """

    def __init__(
        self, work: Callable[[], object], environment: Mapping[str, str], output: int
    ) -> None:
        (order, self_order), (self_answer, answer) = os.pipe(), os.pipe()
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                for source, target in ((order, 0), (answer, 1), (output, 2)):
                    os.dup2(source, target)
                for descriptor in (order, self_order, self_answer, answer):
                    os.close(descriptor)
                os.environ.clear()
                os.environ.update(environment)
                work()
            finally:
                os._exit(0)
        os.close(order)
        os.close(answer)
        self.stdin = os.fdopen(self_order, "wb", buffering=0)
        self.stdout = os.fdopen(self_answer, "rb", buffering=0)

    def kill(self) -> None:
        """Ends it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit code; None while it lives."""
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        """Waits for its end."""
        code = self._look(0)
        assert code is not None, "it has been waited for"
        return code

    def _look(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code
