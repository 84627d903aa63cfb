"""The folder of a gang, `ROOT/gangs/NAME-EPOCH`, in which it and its engine leave each other word.

`spec.json` what to start; `commands.jsonl` and `events.jsonl`, its command log and its event log;
`meet.json` where rank 0's store is; per rank `rank_K.log` (its output), `rank_K.pid` (written by
itself), `end_K.json` (why it failed, in its own words) and `exit_K` (its exit code, where only
another process can know it); `closed` once no process may start in it any more.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, Self

from tlora_megatron.append_log import AppendLog
from tlora_megatron.files import read_json, write_atomic
from tlora_megatron.service.home import Home, make_folder
from tlora_megatron.service.messages import Command, GangEvent, GangSpec

logger = logging.getLogger(__name__)

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

    @classmethod
    def all_of(cls, home: Home) -> list[Self]:
        """The folders of all gangs by name; what is none of them is left alone."""
        found = []
        for path in sorted(home.gangs.iterdir()):
            try:
                found.append(cls.at(path))
            except ValueError:
                logger.warning("%s is no gang's folder: it is left alone", path)
        return found

    def commands(self) -> AppendLog[Command]:
        """The log that its engine writes and its rank 0 reads."""
        return AppendLog(self.path / "commands.jsonl", Command, "seq")

    def events(self) -> AppendLog[GangEvent]:
        """The log that its rank 0 writes, and its engine once no rank is left."""
        return AppendLog(self.path / "events.jsonl", GangEvent, "number")

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
        write_atomic(self.path / name, text)

    def read_json(self, name: str) -> Any:
        """The value of a JSON file that `write` wrote; None while there is none."""
        return read_json(self.path / name)
