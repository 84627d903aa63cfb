"""Where rank 0 of a gang finds its commands and leaves its events."""

from __future__ import annotations

import time
from typing import Protocol

from tlora_megatron.service.mail.folder import GangFolder
from tlora_megatron.service.mail.lines import LineReader, LineWriter
from tlora_megatron.service.messages import Command, GangEvent

_LOOK_S = 0.005
"""Between two looks at a folder while a gang has nothing to do: one stat each."""


class Mailbox(Protocol):
    """Commands in, events out; of rank 0 only."""

    def take(self) -> list[Command]:
        """New commands, each once and in order; never waits."""

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; returns True as soon as there is something to take."""

    def tell(self, event: GangEvent, *, durable: bool = False) -> None:
        """Leaves an event; `durable` ones outlive this machine's fall."""


class FolderMailbox:
    """A mailbox of files in the gang's folder, which outlive both sides."""

    def __init__(self, folder: GangFolder) -> None:
        self._commands = LineReader(folder.commands)
        self._events = LineWriter(folder.events)
        self._seq = 0

    def take(self) -> list[Command]:
        """New commands, each once and in order; never waits."""
        new = []
        for command in map(Command.from_json, self._commands.read()):
            if command.seq > self._seq:
                self._seq = command.seq
                new.append(command)
        return new

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; returns True as soon as there is something to take."""
        end_s = time.monotonic() + seconds
        while not self._commands.has_more:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(_LOOK_S, left_s))
        return True

    def tell(self, event: GangEvent, *, durable: bool = False) -> None:
        """Appends an event to the folder's file."""
        self._events.append(event.to_json(), durable=durable)
