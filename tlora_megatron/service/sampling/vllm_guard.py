"""Keeps vLLM no longer than who has started it: `python -m ....vllm_guard LOCK COMMAND...`.

vLLM does not look whether anybody still needs it; killed, it leaves its engine's processes behind,
and with them a GPU's memory. So this process starts it, and ends its whole process group with it or
when the standard input ends. The lock is held meanwhile: who starts vLLM again beside a service
that was killed waits until the former one's memory is free.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

_LOOK_S = 0.1
_GRACE_S = 10.0
"""Between SIGTERM, upon which vLLM drops its requests, and SIGKILL."""


def main(path: str, *command: str) -> int:
    """Runs a command under a lock; returns its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with open(path, "a") as lock:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if _is_left():
                return 0
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        try:
            while process.poll() is None and not _is_left():
                pass
            return process.poll() or 0
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _is_left() -> bool:
    """Waits a moment; True if who has started this process has closed its input, or is no more."""
    readable, _, _ = select.select([0], [], [], _LOOK_S)
    return bool(readable) and not os.read(0, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
