"""The words of a controller and its gangs to each other: plain values that travel as JSON.

A *gang* is the processes of one live super-model. It is known by a name and an epoch, which grows
by one with every start under that name, so that messages of an earlier start can be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tlora_megatron.channel import Message

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
        """Number of its processes."""
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
