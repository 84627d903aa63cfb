"""What rank 0 reads and writes for its gang: commands, under the lease they renew, and events."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora_megatron.append_log import AppendLog
from tlora_megatron.service.home import Home, Lease, read_lease
from tlora_megatron.service.messages import Command, EventKind, GangEvent, GangSpec

logger = logging.getLogger(__name__)

_DURABLE = frozenset({"saved", "left", "ended", "stopped", "died"})
"""Events after which the controller gives something up."""
_LOOK_S = 1.0
"""Between two looks at the deadline while a gang is idle."""


class EventWriter:
    """Numbers a gang's events without a gap, on any thread; what the disk refuses is told again."""

    def __init__(self, spec: GangSpec, events: AppendLog[GangEvent]) -> None:
        self._spec = spec
        self._events = events
        self._number = 0
        self._untold: deque[GangEvent] = deque()
        self._turn = threading.Lock()

    def tell(self, kind: EventKind, job: str | None, body: Mapping[str, Any]) -> None:
        with self._turn:
            self._number += 1
            event = GangEvent(
                gang=self._spec.gang,
                epoch=self._spec.epoch,
                number=self._number,
                at=time.time(),
                kind=kind,
                job=job,
                body=body,
            )
            self._untold.append(event)
            try:
                while self._untold:
                    event = self._untold[0]
                    self._events.append(event, durable=event.kind in _DURABLE)
                    self._untold.popleft()
            except OSError as error:
                if len(self._untold) == 1:
                    logger.warning("the controller hears of nothing for now: %s", error)


class CommandReader:
    """The commands that rank 0's loop sees, which it may not follow once the lease is over."""

    def __init__(self, spec: GangSpec, commands: AppendLog[Command]) -> None:
        self._spec = spec
        self._home = Home(Path(spec.root))
        self._commands = commands
        self._seq = 0
        self._leases: dict[str, int] = {}
        self.deadline = Deadline(spec.lease_s)

    def take(self) -> list[dict[str, Any]]:
        """New commands of this epoch as mappings, each once; never waits."""
        commands = self._commands.after(self._seq)
        self._seq = commands[-1].seq if commands else self._seq
        self.deadline.looked(found=bool(commands))
        if self.deadline.is_over:
            return [{"kind": "stop", "job": None, "body": {"save": False}, "seq": 0}]
        own = (self._spec.gang, self._spec.epoch)
        mine = [command for command in commands if (command.gang, command.epoch) == own]
        for command in mine:
            if command.kind == "prepare" and command.job is not None:
                self._leases[command.job] = int(command.body["lease"])
        return [asdict(command) for command in mine]

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; returns True as soon as there is something to take."""
        end_s = time.monotonic() + seconds
        while not self.deadline.is_over:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            if self._commands.wait(min(left_s, _LOOK_S, max(self.deadline.left_s, 0.0))):
                return True
            self.deadline.looked(found=False)
        return True

    def may_write(self, job: str) -> bool:
        """True while the lease of the gang lasts and the job's folder names it."""
        if self.deadline.is_over or job not in self._leases:
            return False
        mine = Lease(gang=self._spec.gang, epoch=self._spec.epoch, lease=self._leases[job])
        return read_lease(self._home.job(job)) == mine and not self.deadline.is_over


class Deadline:
    """The end of a gang's lease, `lease_s` after the last sign of life of a controller.

    A process that was stopped for long must not take commands that lay there for a sign of life:
    they renew the lease from the last look that did *not* find them.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._looked_s = now_s()
        self._end_s = self._looked_s + lease_s

    def looked(self, *, found: bool) -> None:
        """Notes a look for commands, and whether it found some."""
        if found and not self.is_over:
            self._end_s = self._looked_s + self._lease_s
        self._looked_s = now_s()

    @property
    def is_over(self) -> bool:
        """True once nothing has been heard of a controller for the lease's time."""
        return self.left_s <= 0

    @property
    def left_s(self) -> float:
        return self._end_s - now_s()


def now_s() -> float:
    """A clock that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
