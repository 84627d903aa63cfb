"""Spare processes that are forks of this one, where it has everything imported already."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import IO

from tlora_megatron.service.engines.local.spares import Spare
from tlora_megatron.service.worker import standby


def install() -> None:
    """Has engines of this process fork their spares, which costs no import."""
    Spare.open_process = staticmethod(ForkedProcess)  # type: ignore[method-assign,assignment]


class ForkedProcess:
    """What `Spare` uses of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> None:
        (order, self_order), (self_answer, answer) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                for source, target in ((order, 0), (answer, 1), (output.fileno(), 2)):
                    os.dup2(source, target)
                for descriptor in (order, self_order, self_answer, answer):
                    os.close(descriptor)
                os.environ.clear()
                os.environ.update(environment)
                standby.serve_orders(forks="--forks" in command)
            finally:
                os._exit(0)
        os.close(order)
        os.close(answer)
        self.stdin, self.stdout = os.fdopen(self_order, "wb"), os.fdopen(self_answer, "rb")

    def poll(self) -> int | None:
        """The exit code; None while it lives."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def wait(self) -> int:
        """Waits for its end."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
