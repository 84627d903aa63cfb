"""One gang as a step of an allocation: the srun that speaks for it, and SLURM's own word."""

from __future__ import annotations

import logging
import math
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

from tlora_megatron.service.engines.endings import blame, say_died, without_early_stop
from tlora_megatron.service.engines.slurm.allocation import Allocation
from tlora_megatron.service.mail.folder import EventReader, GangFolder, Outbox
from tlora_megatron.service.mail.lines import LineReader
from tlora_megatron.service.messages import Command, GangEvent, GangSpec
from tlora_megatron.service.processes import Life

logger = logging.getLogger(__name__)

SRUN_LOG = "srun.log"
SRUN_PID = "srun.pid"
_KILL_S = 10.0
"""For which `kill` waits: SLURM's programs take tenths of a second each, and ask over a network."""
_LOOK_S = 0.2
"""Between two questions whether a step that was killed is gone."""
_WATCH_S = 1.0
"""Between two questions whether a step lives of which no srun tells."""
_COMPLAINT = re.compile(r"tasks? (?P<tasks>[\d,\-\[\]]+): (?P<how>.+)")
_EXIT = re.compile(r"Exited with exit code (\d+)")
_SIGNALS: Mapping[str, int] = {
    text: number for number in signal.valid_signals() if (text := signal.strsignal(number))
}


class SlurmGang:
    """The step of one start of a gang.

    Args:
        srun: the life of the srun that has started it; over where it ran on another host.
        process: the same as this process's child; None where it is not.
    """

    def __init__(
        self,
        folder: GangFolder,
        spec: GangSpec,
        allocation: Allocation,
        srun: Life,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.folder = folder
        self.spec = spec
        self._allocation = allocation
        self._srun = srun
        self._process = process
        self._events = EventReader(folder)
        self._said = LineReader(folder.path / SRUN_LOG)
        self._outbox: Outbox | None = None
        self._died: dict[str, Any] | None = None
        """Body of the last event, once the gang is ending."""
        self._asked_s = -math.inf
        self.is_over = False
        """True once SLURM has no such step any more and its last event is written."""

    @property
    def is_ending(self) -> bool:
        """True once one of its processes was missed."""
        return self._died is not None

    def post(self, command: Command) -> None:
        """Leaves a command in the gang's folder; one for a gang that is over is dropped."""
        if not self.is_over:
            self._outbox = self._outbox or Outbox(self.folder)
            self._outbox.post(command)

    def events(self, number: int) -> list[GangEvent]:
        """Events behind a number, in order; `stopped` not before the step is gone."""
        return without_early_stop(self._events.after(number), is_over=self.is_over)

    def look(self, steps: Callable[[], Mapping[str, str]]) -> None:
        """Ends the gang if one of its processes has ended.

        Args:
            steps: asks SLURM for its steps; called only where nothing nearer tells.
        """
        if self.is_over:
            return
        if self._died is None:
            try:
                self._notice(steps)
            except RuntimeError as error:
                logger.warning("%s", error)
        if self._died is not None and self._is_due(_LOOK_S):
            self._end(steps)

    def kill(self, reason: str, steps: Callable[[], Mapping[str, str]]) -> bool:
        """Ends all processes by SIGKILL; True when SLURM says that they are gone."""
        self._died = self._died or {"rank": 0, "reason": reason}
        end_s = time.monotonic() + _KILL_S
        while not self.is_over and time.monotonic() < end_s:
            self._end(steps)
            if not self.is_over:
                time.sleep(0.05)
        return self.is_over

    def release(self) -> None:
        """Lets go of the step, which goes on."""
        self._srun.close()
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None

    def _notice(self, steps: Callable[[], Mapping[str, str]]) -> None:
        codes = complaints(self._said.read())
        if codes:
            self._died = blame(self.folder, codes)
        elif self._srun.is_over and self._is_due(_WATCH_S):
            if self.folder.path.name not in steps():
                self._died = self._silent_end()
            elif any(self.folder.path.glob("e*_*")):  # exit_K, end_K.json
                self._died = blame(self.folder, dict.fromkeys(range(self.spec.world_size)))

    def _silent_end(self) -> dict[str, Any]:
        """The body of `died` for a step of which srun had nothing to say."""
        if any(self.folder.pid(rank).exists() for rank in range(self.spec.world_size)):
            return blame(self.folder, dict.fromkeys(range(self.spec.world_size)))
        log = self.folder.path / SRUN_LOG
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        said = [line for line in lines if line.strip()]
        how = f"srun said: {said[-1]}" if said else "and srun said nothing"
        return {"rank": 0, "reason": f"SLURM has not started the gang, {how}"}

    def _end(self, steps: Callable[[], Mapping[str, str]]) -> None:
        """Carries the ending on: no srun, no step, then the last word."""
        if not self.folder.is_closed:
            self.folder.close()
        self._srun.kill()
        try:
            step = steps().get(self.folder.path.name)
        except RuntimeError:
            return  # without an answer there is no proof
        if step is not None:
            self._allocation.kill_step(step)
        elif self._srun.is_over:
            assert self._died is not None, "only a gang that is ending is ended"
            say_died(self.folder, self._died)
            self.is_over = True
            self.release()
            if self._process is not None:
                self._process.wait()

    def _is_due(self, pause_s: float) -> bool:
        now_s = time.monotonic()
        if now_s < self._asked_s + pause_s:
            return False
        self._asked_s = now_s
        return True


def complaints(lines: list[str]) -> dict[int, int]:
    """Rank -> exit code, -n by signal n, of what srun reports of tasks that failed.

    SIGTERM is what srun itself sends to the others; it is told only where there is nothing else.
    """
    codes: dict[int, int] = {}
    for line in lines:
        match = _COMPLAINT.search(line)
        code = _code(match["how"]) if match else None
        if match and code is not None:
            codes |= dict.fromkeys(_numbers(match["tasks"]), code)
    real = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
    return real or codes


def _code(how: str) -> int | None:
    if found := _EXIT.match(how):
        return int(found[1])
    number = _SIGNALS.get(how.removesuffix(" (core dumped)"))
    return None if number is None else -number


def _numbers(text: str) -> list[int]:
    """The numbers of `3`, `0-2,5` or `[0-2]`."""
    ends = (part.partition("-") for part in text.strip("[]").split(","))
    return [n for begin, _, end in ends for n in range(int(begin), int(end or begin) + 1)]
