"""One gang on Ray as its engine sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_megatron.service.engines.endings import blame, say_died, without_early_stop
from tlora_megatron.service.engines.ray.agent import reap
from tlora_megatron.service.engines.ray.connection import Connection
from tlora_megatron.service.mail.folder import EventReader, GangFolder
from tlora_megatron.service.messages import Command, GangEvent, GangSpec

_REAP_S = 2.0


class RayGang:
    """The actors of one start of a gang, seen through the bridge, and its folder."""

    def __init__(self, folder: GangFolder, spec: GangSpec) -> None:
        self.folder = folder
        self.spec = spec
        self._news: list[GangEvent] = []
        self._open: list[Command] = []
        """Commands that are not known to be carried out: a bridge may be lost with them."""
        self._past = EventReader(folder)
        self._died: dict[str, Any] | None = None
        self._is_told = False
        """True once a bridge was asked to end it."""
        self.is_over = False
        """True once all is done that can be done to end it, and its last event is written."""
        self.is_proved = False
        """True with proof that none of its processes is left."""

    @property
    def is_ending(self) -> bool:
        """True once one of its processes was missed."""
        return self._died is not None

    @property
    def has_stopped(self) -> bool:
        """True once its last word is written; its processes may be about to end."""
        last = EventReader(self.folder).last()
        return self.is_over or (last is not None and last.kind in ("stopped", "died"))

    @property
    def key(self) -> dict[str, Any]:
        """Its name and epoch, as the bridge is told them."""
        return {"gang": self.spec.gang, "epoch": self.spec.epoch}

    def post(self, command: Command, connection: Connection | None) -> None:
        """Hands a command on, now and to every bridge until the gang has carried it out."""
        if not self.is_over:
            self._open.append(command)
            if connection is not None:
                connection.send("post", **self.key, command=command.to_json())

    def adopted(self, connection: Connection, since: int) -> None:
        """Tells a new bridge what the one before may not have heard."""
        connection.send("read", **self.key, since=since)
        for command in self._open:
            connection.send("post", **self.key, command=command.to_json())

    def hear(self, lines: list[str]) -> None:
        """Takes events that the bridge has read."""
        for event in map(GangEvent.from_json, lines):
            self._news.append(event)
            if event.kind == "applied":
                self._open = [c for c in self._open if c.seq > event.body["seq"]]

    def events(self, number: int) -> list[GangEvent]:
        """Events behind a number, in order and without a gap; `stopped` once it is over.

        The bridge brings them as they come; the folder has those before, and all in the end.
        """
        self._news = [event for event in self._news if event.number > number]
        if self.is_over or (self._news and self._news[0].number != number + 1):
            self._news = self._past.after(number)
        return without_early_stop(list(self._news), is_over=self.is_over)

    def is_missed(self, reason: Mapping[str, Any] | Mapping[int, int | None]) -> None:
        """Begins the gang's end, by the body of `died` or by ranks' exit codes."""
        if self._died is None:
            is_body = "reason" in reason
            self._died = dict(reason) if is_body else blame(self.folder, reason)  # type: ignore[arg-type]

    def end(self, connection: Connection | None) -> None:
        """Ends what runs in reach of this process, and has the bridge end the rest."""
        if self.is_over or self._died is None or (self._is_told and connection is not None):
            return
        self.folder.close()
        ranks = list(range(self.spec.world_size))
        unproved = sorted(set(ranks) - set(reap(str(self.folder.path), ranks, _REAP_S)))
        if connection is None:
            self.finish(is_proved=not unproved)
        else:
            self._is_told = True
            connection.send("end", **self.key, unproved=unproved)

    def finish(self, *, is_proved: bool) -> None:
        """Writes the last event."""
        say_died(self.folder, self._died or {"rank": 0, "reason": "it has ended"})
        self.is_over, self.is_proved = True, is_proved

    def forget_bridge(self) -> None:
        """Notes that a new bridge knows nothing of what the last one was told."""
        self._is_told = False
