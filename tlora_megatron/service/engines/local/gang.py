"""One gang of this host as its engine sees it: its processes, and how they end."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tlora_megatron.service.engines.endings import blame, say_died, without_early_stop
from tlora_megatron.service.mail.folder import EventReader, GangFolder, Outbox
from tlora_megatron.service.messages import Command, GangEvent, GangSpec
from tlora_megatron.service.processes import Life, ended

_LEAVE_S = 10.0
"""For the ranks of a gang that has stopped as asked to be gone by themselves."""
_WORD_S = 5.0
"""For a parent that is not the engine to note how its child has ended."""
_KILL_S = 2.0
"""For which `kill` waits: a process within a driver's call is not gone at once."""


@dataclass(kw_only=True, slots=True)
class Member:
    """A rank's process, or where it will come from."""

    rank: int
    life: Life | None = None
    """None until a process that another one forks has said who it is."""
    parent: Life | None = None
    """Who was asked to fork it; None = nobody."""
    process: subprocess.Popen[bytes] | None = None
    """None where it is nobody's child here."""

    def exit_code(self, folder: GangFolder) -> int | None:
        """How it ended, -n by signal n; None if that is not known (yet)."""
        code = self.process.poll() if self.process is not None else None
        return code if code is not None else folder.read_json(f"exit_{self.rank}")

    def may_tell(self) -> bool:
        """True if a process is there that will note how this one has ended."""
        return self.parent is not None and not self.parent.is_over

    @property
    def is_missing(self) -> bool:
        """True if its process runs no more, or none will come."""
        if self.life is not None:
            return self.life.is_ending
        return self.parent is None or self.parent.is_over

    @property
    def is_gone(self) -> bool:
        """True if nothing is left of its process, or there is none."""
        return self.life is None or self.life.is_over


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ending:
    kill_at_s: float
    leaves: bool = False
    """All that are missing have ended without a fault."""
    to_blame: Sequence[Member] = ()
    """Who was missed first; of them `died` tells."""
    reason: str | None = None
    """A sentence that `died` tells instead of naming a process."""
    word_at_s: float = -math.inf
    """Until then a parent's note of how they ended is waited for."""


class LocalGang:
    """The processes of one start of a gang."""

    def __init__(self, folder: GangFolder, spec: GangSpec, members: Sequence[Member]) -> None:
        self.folder = folder
        self.spec = spec
        self._members = tuple(members)
        self._events = EventReader(folder)
        self._outbox: Outbox | None = None
        self._ending: _Ending | None = None
        self.has_spoken = False
        """True once an event of it was read: it has started, or failed to."""
        self.is_over = False
        """True once all processes are gone and its last event is written."""

    @property
    def is_ending(self) -> bool:
        """True once a process was missed, or all are to end."""
        return self._ending is not None

    def post(self, command: Command) -> None:
        """Leaves a command in the gang's folder; one for a gang that is over is dropped."""
        if not self.is_over:
            self._outbox = self._outbox or Outbox(self.folder)
            self._outbox.post(command)

    def events(self, number: int) -> list[GangEvent]:
        """Events behind a number, in order; `stopped` not before all processes are gone."""
        events = self._events.after(number)
        self.has_spoken = self.has_spoken or bool(events)
        return without_early_stop(events, is_over=self.is_over)

    def look(self) -> None:
        """Ends the gang if one of its processes has ended; waits for nothing."""
        if self.is_over:
            return
        self._find_forks()
        if self._ending is None or self._ending.leaves:
            self._judge()
        self._get_on()

    def kill(self, reason: str) -> bool:
        """Ends all processes by SIGKILL; True with proof that they are gone."""
        if self.is_over:
            return True
        if self._ending is None or self._ending.leaves:
            self._ending = _Ending(kill_at_s=-math.inf, reason=reason)
        end_s = time.monotonic() + _KILL_S
        self._get_on()
        while not self.is_over and (left_s := end_s - time.monotonic()) > 0:
            ended([life for life in self._lives() if not life.is_over], min(left_s, 0.05))
            self._find_forks()
            self._get_on()
        return self.is_over

    def release(self) -> None:
        """Lets go of the processes, which go on."""
        for life in self._lives():
            life.close()
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None

    def _lives(self) -> list[Life]:
        return [member.life for member in self._members if member.life is not None]

    def _find_forks(self) -> None:
        for member in self._members:
            if member.life is None and (path := self.folder.pid(member.rank)).exists():
                member.life = Life.known_as(path.read_text())

    def _judge(self) -> None:
        """Decides what is to happen if ranks are missing."""
        missing = [member for member in self._members if member.is_missing]
        if not missing:
            return
        now_s = time.monotonic()
        failed = [m for m in missing if m.life is None or m.exit_code(self.folder) != 0]
        if failed:
            self._ending = _Ending(kill_at_s=now_s, to_blame=failed, word_at_s=now_s + _WORD_S)
        elif self._has_stopped() and (self._ending is None or self._ending.kill_at_s == math.inf):
            self._ending = _Ending(kill_at_s=now_s + _LEAVE_S, leaves=True)
        elif self._ending is None or len(missing) == len(self._members):
            # Ended as if asked to: the others, which may still save, will say so.
            self._ending = _Ending(kill_at_s=math.inf, leaves=True, to_blame=missing)

    def _has_stopped(self) -> bool:
        last = self._events.last()
        return last is not None and last.kind == "stopped"

    def _get_on(self) -> None:
        """Carries an ending as far as it goes without waiting."""
        ending = self._ending
        if ending is None:
            return
        if time.monotonic() >= ending.kill_at_s:
            if not self.folder.is_closed:
                self.folder.close()
                self._find_forks()  # one that says who it is later sees that it is too late
            for life in self._lives():
                life.kill()
        is_empty = all(member.is_gone for member in self._members)
        if is_empty and (time.monotonic() >= ending.word_at_s or not self._waits(ending)):
            if not self._has_stopped():
                say_died(self.folder, self._died(ending))
            self.is_over = True
            for member in self._members:
                if member.process is not None:
                    member.process.wait()  # or its number would stay taken
            self.release()

    def _waits(self, ending: _Ending) -> bool:
        """True if somebody is about to note how the first to go has ended."""
        return any(m.exit_code(self.folder) is None and m.may_tell() for m in ending.to_blame)

    def _died(self, ending: _Ending) -> dict[str, Any]:
        """The body of the gang's last event."""
        if ending.reason is not None:
            return {"rank": 0, "reason": ending.reason}
        codes = {member.rank: member.exit_code(self.folder) for member in ending.to_blame}
        return blame(self.folder, codes)
