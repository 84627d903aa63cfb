"""The words of a controller and its gangs to each other, and the folder where they leave them.

A *gang* is the processes of one live super-model, known by a name and an epoch, which grows by one
with every start. Its folder: `spec.json`; `commands.jsonl` and `events.jsonl`; `meet.json`, where
rank 0's store is; per rank `rank_K.log`, `rank_K.pid` (written by itself), `end_K.json` (why it
failed) and `exit_K` (its exit code); `closed` once no process may start in it any more.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from tlora_megatron.append_log import AppendLog
from tlora_megatron.channel import Message
from tlora_megatron.files import read_json, write_atomic
from tlora_megatron.service.home import Home, make_folder

CommandKind = Literal["prepare", "join", "leave", "save", "renew", "stop"]
"""The commands of a controller to a gang.

prepare: read a job's data and state beside training; body: `JobOrder`.
join: let a prepared job take part from the next boundary of rounds on; body: `{"more": true}` where
  another `join` follows at once, which a gang without a round under way waits for.
leave: take a job out at the next boundary; body: `{"save": bool, "why": str}`.
save: write the checkpoints of all jobs now.
renew: nothing but a sign of life of the controller; every command is one.
stop: save all jobs and end; body: `{"save": bool}`.
"""

EventKind = Literal[
    "started",
    "prepared",
    "refused",
    "joined",
    "stepped",
    "evaluated",
    "at_rung",
    "saved",
    "not_saved",
    "left",
    "ended",
    "round",
    "applied",
    "stopped",
    "died",
    "note",
]
"""The events that a gang tells of itself.

started: processes stand and the base is loaded; body: seconds by phase.
prepared, refused: a job can join, or cannot and why (`{"error": str}`); prepared has
  `{"digest": str, "num_steps": int, "from_step": int}`.
joined: `{"round": int, "from_step": int, "stall_s": float}`; stall_s is what neighbours waited.
stepped: `{"step": int, "loss": float, "lr": float, "tokens": int}`; some may be left out.
evaluated: `{"step": int, "loss": float, "exact_match": float}`.
at_rung: a job has been evaluated behind a step of `JobOrder.hold_at`, and steps no further:
  `{"step": int, "scores": {metric: float}}`.
saved, not_saved: `{"step": int}`, with `{"error": str}` where the disk refused.
left: a job is out and, where asked, saved; `{"step": int}`.
ended: a job took its last step or failed by itself;
  `{"status": "finished" | "failed", "reason": str | None, "step": int}`.
round: every few seconds: `{"rounds": int, "tokens_per_s": float, "jobs": {name: tokens_per_s}}`.
applied: a command was carried out; `{"seq": int}`.
stopped: the gang ended as asked. died: it ended otherwise;
  `{"rank": int, "reason": str, "out_of_memory": bool, "newcomers": [job id]}`, and
  `"was_killed": true` where a signal from outside ended that rank.
note: a sentence for the job's or the gang's log; `{"message": str}`.
"""


UNSTORED_SEQ = 2**53 - 1
"""Number of a `stop` of which no store knows; a gang's own at the end of its lease has 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GangSpec(Message):
    """All that is needed to start a gang."""

    gang: str
    """Its name, made by the controller: letters, digits and hyphens."""
    epoch: int
    base_model: Mapping[str, Any]
    """The section `base_model` of a run's configuration."""
    parallel: Mapping[str, Any]
    """The section `parallel`."""
    run: Mapping[str, Any]
    """The section `run`, without what belongs to single jobs."""
    gpus: tuple[tuple[int, int], ...]
    """Node and GPU of every process, in the order of ranks; on CPUs worker slots of a node."""
    root: str
    """The service's folder, which all processes see: `jobs/ID`, `gangs/NAME`, `cache`."""
    lease_s: float = 600.0
    """It stops writing and stepping when it has not heard of a controller for so long."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpus", tuple((int(node), int(gpu)) for node, gpu in self.gpus))

    @property
    def world_size(self) -> int:
        return len(self.gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command(Message):
    """One thing that a controller asks of a gang; carried out once, in the order of `seq`."""

    gang: str
    epoch: int
    seq: int
    """Grows by one within an epoch, from 1; a gang drops what it has carried out."""
    kind: CommandKind
    job: str | None = None
    """Id of the job."""
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class GangEvent(Message):
    """One thing that a gang tells."""

    gang: str
    epoch: int
    number: int
    """Grows by one within an epoch, from 1, with no gap."""
    at: float
    """Unix time in seconds."""
    kind: EventKind
    job: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOrder(Message):
    """The body of `prepare`: a job as a gang needs it."""

    job: str
    """Id of the job, which names its folder and its adapter inside the gang."""
    name: str
    """The user's name for it; for messages only."""
    document: Mapping[str, Any]
    """The job as an entry of `jobs` in a run's configuration, with absolute paths and with
    `portion_tokens` set: fixed when it was accepted, so that no gang changes its bits."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Keys of its files in the cache of tokens: `train`, and `eval` if it has one."""
    lease: int
    """Its lease epoch: the gang writes the job's folder only while `lease.json` there says so."""
    checkpoint_every_s: float = 60.0
    checkpoint_every_steps: int = 0
    """0 = by time only."""
    saves_soon: bool = False
    """Its last gang died: it is saved soon after it has joined, then less and less often."""
    hold_at: tuple[int, ...] = ()
    """Steps, ascending, behind the first of which it is evaluated and makes no further one."""


logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<gang>.+)-(?P<epoch>\d+)")


class GangFolder:
    """Names and writes the files of one start of a gang."""

    def __init__(self, root: Path | str, gang: str, epoch: int) -> None:
        self.gang, self.epoch = gang, epoch
        self.path = Home(Path(root)).gang(gang, epoch)

    @classmethod
    def at(cls, path: Path) -> Self:
        """The folder that `path` of another one has named; a `ValueError` for any other path."""
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
        """Makes the folder and writes the spec; `FileExistsError` if the epoch is known."""
        make_folder(self.path.parent)
        # A folder alone is what a crash has left before anything was started.
        self.path.mkdir(mode=0o700, exist_ok=not self.has_spec)
        self.write("spec.json", spec.to_json())

    @property
    def has_spec(self) -> bool:
        """True once a gang was to start here."""
        return (self.path / "spec.json").exists()

    def spec(self) -> GangSpec:
        """Reads what `create` wrote; raises `OSError` or `ValueError` if it is not there."""
        return GangSpec.from_json((self.path / "spec.json").read_text())

    def write(self, name: str, text: str) -> None:
        """Writes a whole file or nothing."""
        write_atomic(self.path / name, text)

    def read_json(self, name: str) -> Any:
        """The value of a JSON file that `write` wrote; None while there is none."""
        return read_json(self.path / name)
