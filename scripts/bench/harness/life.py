"""One life of a script in processes of its own."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Life(NamedTuple):
    """The end of a life."""

    code: int | None
    """Exit status; None: it took too long."""
    seconds: float
    output: str


def live(command: Sequence[str], env: Mapping[str, str], log: Path, timeout_s: float) -> Life:
    """Runs a command whose output goes to a file; behind the timeout it is killed.

    Of torchrun the agent is killed, and the ranks end with it. If this process is interrupted
    meanwhile, it prints the end of the output.
    """
    begin = time.monotonic()
    code: int | None = None
    try:
        with log.open("w") as sink, contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                command, env=env, stdout=sink, stderr=subprocess.STDOUT, timeout=timeout_s
            ).returncode
    except KeyboardInterrupt:
        print(log.read_text(errors="replace")[-4000:], flush=True)
        raise
    return Life(code, time.monotonic() - begin, log.read_text(errors="replace"))
