"""Reads server-sent events from lines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from tlora_megatron.client.values import Event


@dataclass(slots=True)
class EventReader:
    """Takes the lines of a stream, and gives events when they are whole."""

    last: str | None = None
    """Id of the last event, with which a stream goes on."""
    is_over: bool = False
    """The service has said that nothing will follow."""
    _id: str | None = None
    _name: str = ""
    _data: list[str] = field(default_factory=list)

    def feed(self, line: str) -> Event | None:
        """Takes one line without its end; the event that it completes, if it does."""
        if not line:
            return self._end()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            self._id = value
        elif name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value)
        return None

    def cut(self) -> None:
        """Forgets an event that did not arrive as a whole."""
        self._data.clear()
        self._id, self._name = None, ""

    def _end(self) -> Event | None:
        data, self._data = "\n".join(self._data), []
        name = self._name
        self.last = self._id if self._id is not None else self.last
        self._id, self._name = None, ""
        if name == "end":
            self.is_over = True
        if not data or name:
            return None
        return Event(self.last or "", json.loads(data))
