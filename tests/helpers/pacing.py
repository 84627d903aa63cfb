"""Has a gang train a job no further than a test allows, so that nothing hangs on who is faster."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tlora_megatron.training.resident.commands import JobCommands

_FILE = "may_reach"
_HELD_S = 20.0
"""Then comes a round all the same: a gang without rounds would be taken for dead."""
_BUSY_S = 0.2
"""The same while a job is prepared or saved, which goes on between rounds."""
_LOOK_S = 0.02


def allow(root: Path, step: int) -> None:
    """Lets the job train up to this step."""
    file = root / _FILE
    file.with_suffix(".new").write_text(str(step))
    os.replace(file.with_suffix(".new"), file)


def install(root: Path, num_steps: int) -> None:
    """Holds jobs of so many steps in all gangs that are forks of this process.

    The first rank waits before a round, and the others wait for it; commands end the wait.
    """
    original = JobCommands._word

    def word(self: JobCommands, source, *, is_idle):  # type: ignore[no-untyped-def]
        begin_s = time.monotonic()
        while source is not None and not is_idle and _is_held(self, root, num_steps, begin_s):
            if source.wait(_LOOK_S):
                break
        return original(self, source, is_idle=is_idle)

    JobCommands._word = word  # type: ignore[method-assign]


def _is_held(commands: JobCommands, root: Path, num_steps: int, begin_s: float) -> bool:
    loop = commands.loop
    steps = [job.step for job in loop.active if job.plan.num_steps == num_steps]
    if not steps or min(steps) < int((root / _FILE).read_text()):
        return False
    is_short = commands.is_preparing or loop.saver.is_busy
    return time.monotonic() - begin_s < (_BUSY_S if is_short else _HELD_S)
