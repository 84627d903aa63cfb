"""The folder of a gang, `ROOT/gangs/NAME-EPOCH`, in which it and its engine leave each other word.

`spec.json` what to start; `commands.jsonl` and `events.jsonl`, the mail; `meet.json` where rank 0's
store is; per rank `rank_K.log` (its output), `rank_K.pid` (written by itself), `end_K.json` (why it
failed, in its own words) and `exit_K` (its exit code, where only another process can know it);
`closed` once no process may start in it any more.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, Self

from tlora_megatron.files import read_json, write_atomic
from tlora_megatron.service.home import Home, make_folder
from tlora_megatron.service.mail.lines import LineReader, LineWriter, last_line, offset_behind
from tlora_megatron.service.messages import Command, GangEvent, GangSpec

_NAME = re.compile(r"(?P<gang>.+)-(?P<epoch>\d+)")


class GangFolder:
    """Names and writes the files of one start of a gang."""

    def __init__(self, root: Path | str, gang: str, epoch: int) -> None:
        self.gang, self.epoch = gang, epoch
        self.path = Home(Path(root)).gang(gang, epoch)

    @classmethod
    def at(cls, path: Path) -> Self:
        """The folder at a path that `path` of another one has named.

        Raises:
            ValueError: if it is not the name of a gang's folder.
        """
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"a gang's folder must be named NAME-EPOCH, got {path}")
        return cls(path.parent.parent, match["gang"], int(match["epoch"]))

    @property
    def commands(self) -> Path:
        """Lines of `Command`."""
        return self.path / "commands.jsonl"

    @property
    def events(self) -> Path:
        """Lines of `GangEvent`."""
        return self.path / "events.jsonl"

    def log(self, rank: int) -> Path:
        """The file that has a rank's stdout and stderr."""
        return self.path / f"rank_{rank}.log"

    def pid(self, rank: int) -> Path:
        """Who a rank is: process id, start time and boot."""
        return self.path / f"rank_{rank}.pid"

    @property
    def is_closed(self) -> bool:
        """True once no process may start in it any more."""
        return (self.path / "closed").exists()

    def close(self) -> None:
        """Lets no process start in it any more."""
        self.write("closed", "")

    def create(self, spec: GangSpec) -> None:
        """Makes the folder and writes the spec.

        Raises:
            FileExistsError: if the gang was started with this epoch before.
        """
        make_folder(self.path.parent)
        # A folder alone is what a crash has left before anything was started.
        self.path.mkdir(mode=0o700, exist_ok=not self.has_spec)
        self.write("spec.json", spec.to_json())

    @property
    def has_spec(self) -> bool:
        """True once a gang was to start here."""
        return (self.path / "spec.json").exists()

    def spec(self) -> GangSpec:
        """Reads what `create` wrote.

        Raises:
            OSError: if it is not there.
            ValueError: if it is not a spec.
        """
        return GangSpec.from_json((self.path / "spec.json").read_text())

    def write(self, name: str, text: str) -> None:
        """Writes a whole file or nothing."""
        write_atomic(self.path / name, text.encode())

    def read_json(self, name: str) -> Any:
        """The value of a JSON file that `write` wrote; None while there is none."""
        return read_json(self.path / name)


class Outbox:
    """Appends commands to a gang's folder, each `seq` once."""

    def __init__(self, folder: GangFolder) -> None:
        self._writer = LineWriter(folder.commands)
        last = last_line(folder.commands)
        self._last = Command.from_json(last).seq if last else 0

    def post(self, command: Command) -> None:
        """Appends a command unless it, or a later one, is there already."""
        if command.seq > self._last:
            self._writer.append(command.to_json(), durable=True)
            self._last = command.seq

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class EventReader:
    """Reads a gang's events behind any number; quick where the caller reads on."""

    def __init__(self, folder: GangFolder) -> None:
        self._folder = folder
        self._lines = LineReader(folder.events)
        self._last = 0
        """Number of the last event that `_lines` has read."""

    def after(self, number: int) -> list[GangEvent]:
        """Events with a greater number, in order."""
        if number != self._last:
            offset = offset_behind(self._folder.events, partial(_is_up_to, number))
            self._lines = LineReader(self._folder.events, offset)
        self._last = number
        events = [event for line in self._lines.read() if (event := _event(line))]
        if events:
            self._last = events[-1].number
        return [event for event in events if event.number > number]

    def last(self) -> GangEvent | None:
        """The last event of all."""
        last = last_line(self._folder.events)
        if last is None:
            return None
        if (event := _event(last)) is not None:
            return event
        events = self.after(0)
        return events[-1] if events else None


def _event(line: str) -> GangEvent | None:
    """The event of a line; None for one that a fall of the machine has left damaged."""
    try:
        return GangEvent.from_json(line)
    except ValueError:
        return None


def _is_up_to(number: int, line: str) -> bool:
    event = _event(line)
    return event is not None and event.number <= number
