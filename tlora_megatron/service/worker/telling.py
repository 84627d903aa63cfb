"""Rank 0's ears and mouth: the resident loop's plain words as commands and events."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora_megatron.service.home import Home, Lease, read_lease
from tlora_megatron.service.mail.mailbox import Mailbox
from tlora_megatron.service.messages import Command, EventKind, GangEvent, GangSpec
from tlora_megatron.service.worker.deadline import Deadline

logger = logging.getLogger(__name__)

_DURABLE = frozenset({"saved", "left", "ended", "stopped", "died"})
"""Events after which the controller gives something up."""
_LOOK_S = 1.0
"""Between two looks at the deadline while a gang is idle."""


class Teller:
    """Numbers a gang's events without a gap; any thread may tell.

    What the disk refuses is told before the next event: every renewed lease brings one.
    """

    def __init__(self, spec: GangSpec, mailbox: Mailbox) -> None:
        self._spec = spec
        self._mailbox = mailbox
        self._number = 0
        self._untold: deque[GangEvent] = deque()
        self._turn = threading.Lock()

    def tell(self, kind: EventKind, job: str | None, body: Mapping[str, Any]) -> None:
        """Tells one thing."""
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
            self._tell_all()

    def _tell_all(self) -> None:
        try:
            while self._untold:
                event = self._untold[0]
                self._mailbox.tell(event, durable=event.kind in _DURABLE)
                self._untold.popleft()
        except OSError as error:
            if len(self._untold) == 1:
                logger.warning("the controller hears of nothing for now: %s", error)


class Hearing:
    """The mailbox that the resident loop of rank 0 sees; knows which jobs it may write.

    Once the lease is over the loop is told to stop without saving, whatever else there is.
    """

    def __init__(self, spec: GangSpec, mailbox: Mailbox) -> None:
        self._spec = spec
        self._home = Home(Path(spec.root))
        self._mailbox = mailbox
        self._leases: dict[str, int] = {}
        self.deadline = Deadline(spec.lease_s)

    def take(self) -> list[dict[str, Any]]:
        """New commands of this epoch as mappings, each once; never waits."""
        commands = self._mailbox.take()
        self.deadline.looked(found=bool(commands))
        if self.deadline.is_over:
            return [{"kind": "stop", "job": None, "body": {"save": False}, "seq": 0}]
        mine = [command for command in commands if self._is_mine(command)]
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
            if self._mailbox.wait(min(left_s, _LOOK_S, max(self.deadline.left_s, 0.0))):
                return True
            self.deadline.looked(found=False)
        return True

    def may_write(self, job: str) -> bool:
        """True while the lease of the gang lasts and the job's folder names it."""
        if self.deadline.is_over or job not in self._leases:
            return False
        mine = Lease(gang=self._spec.gang, epoch=self._spec.epoch, lease=self._leases[job])
        return read_lease(self._home.job(job)) == mine and not self.deadline.is_over

    def _is_mine(self, command: Command) -> bool:
        return (command.gang, command.epoch) == (self._spec.gang, self._spec.epoch)
