"""What all parts of a controller share: store, engine, scheduler state and clock."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tlora_megatron.scheduler.policy import RegroupCost
from tlora_megatron.service.control.pricing import Pricing
from tlora_megatron.service.control.records import LiveGang, LiveJob, schedule_of
from tlora_megatron.service.control.state import SchedulerState
from tlora_megatron.service.engines.base import GangEngine
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import Command, CommandKind, GangSpec
from tlora_megatron.service.settings import Settings
from tlora_megatron.service.store import GangState, Job, JobState, Progress, Store

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Context:
    """A controller's tools and state."""

    home: Home
    store: Store
    engine: GangEngine[Any]
    settings: Settings
    pricing: Pricing
    state: SchedulerState
    clock: Callable[[], float]
    """Unix seconds."""
    cost: RegroupCost
    """Pauses of regroupings, as they were measured."""
    on_said: Callable[[str], None] = logger.info

    posts: list[Command] = field(default_factory=list)
    """Commands of the present transaction, posted when it is on the disk."""
    starts: list[GangSpec] = field(default_factory=list)
    leases: list[tuple[str, str, int, int]] = field(default_factory=list)
    """Job, gang, its epoch and the lease, for the files that gangs look at."""
    progress: dict[str, Progress] = field(default_factory=dict)
    """Newest report of each job that is not in the store yet."""
    tallies: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    """How long decisions, joins and starts of gangs took."""
    unsettled: set[str] = field(default_factory=set)
    """Sweeps of which a trial has ended or was paused since they were last looked at."""
    held_back: tuple[str, ...] = ()
    """Why moves of the last decision are not carried out yet."""
    well_since_s: float = -math.inf
    """When the store could be written again: what gangs told of before is of another time."""
    wants_decision: bool = True
    wants_actions: bool = True
    acts_at_s: float = math.inf
    """When actions may be possible though nothing happens."""

    def say(
        self, what: str, message: str, *, job: str | None = None, gang: str | None = None
    ) -> None:
        """Writes a sentence on what happened to the store's events and to the terminal."""
        self.store.events.add("said", job=job, gang=gang, body={"what": what, "message": message})
        self.on_said(message)

    def command(
        self,
        gang: LiveGang,
        kind: CommandKind,
        *,
        job: str | None = None,
        body: dict[str, Any] | None = None,
    ) -> None:
        """Writes a command; it is posted when the transaction is on the disk."""
        now_s = self.clock()
        written = self.store.commands.write(gang.name, gang.epoch, kind, job=job, body=body or {})
        self.posts.append(written)
        gang.commanded_s, gang.lease_until_s = now_s, now_s + self.settings.lease_s

    def change(
        self,
        live: LiveJob,
        to: JobState,
        *,
        release: str | None = None,
        why: str | None = None,
        **fields: Any,
    ) -> None:
        """Changes a job's state in store and state; one that is over leaves the state."""
        row = self.store.jobs.change(live.id, to, release=release, why=why, **fields)
        self._changed(live, row)

    def cancel_waiting(self, jobs: Sequence[LiveJob]) -> None:
        """Cancels jobs that no gang has."""
        rows = {row.id: row for row in self.store.jobs.cancel_waiting([live.id for live in jobs])}
        for live in jobs:
            self._changed(live, rows[live.id])

    def _changed(self, live: LiveJob, row: Job) -> None:
        live.state, live.requested, live.started_at = row.state, row.wish, row.started_at
        if live.sweep is not None and (live.state.is_over or live.state is JobState.PAUSED):
            self.unsettled.add(live.sweep)
        if live.state.is_over:
            self.progress.pop(live.id, None)
            self.state.withdraw(live, self.clock())
            self.state.remove(live)
            self.wants_decision = self.wants_actions = True

    def remember(self, live: LiveJob) -> None:
        """Keeps in the store how a job is to be scheduled."""
        self.store.jobs.update(live.id, schedule=schedule_of(live))

    def note_pause(self, live: LiveJob) -> None:
        """Keeps in the store whether, and until when, a decision has paused a job."""
        pause = self.state.pause_of(live)
        if pause != live.pause:
            live.pause = pause
            self.remember(live)

    def enqueue(self, live: LiveJob, *, is_new: bool = False) -> None:
        """Lets a job wait for a place; a new one fails if the cluster can never hold it."""
        asked = live.num_gpus
        if not self.state.enqueue(live, self.clock()):
            live.num_gpus, wanted = asked, live.num_gpus
            if is_new:
                self.fail(live, self._too_large(live))
            else:
                self._say_once(
                    live,
                    f"job {live.name!r} waits until the service has {wanted} GPUs; it has "
                    f"{self.state.machines.shape.num_gpus} now",
                )
        self.wants_decision = True

    def _too_large(self, live: LiveJob) -> str:
        most = self.state.machines.shape.num_gpus
        assert live.load is not None, f"job {live.id} must be validated before it waits"
        if live.num_gpus > most:
            return (
                f"job {live.name!r} must hold at most as many GPUs as the service has, {most}, "
                f"got {live.num_gpus}: submit it with a smaller service.gpus, or serve more GPUs"
            )
        return (
            f"job {live.name!r} must fit into the memory of the service's GPUs, {most}, "
            f"got sequences of up to {live.load.lengths.longest} tokens: choose a smaller "
            "max_seq_len or lora.rank, or a base in fewer bytes"
        )

    def _say_once(self, live: LiveJob, message: str) -> None:
        """Says why a job waits, unless that was the last thing said of it."""
        said = self.store.events.after(0, job=live.id, kinds=["said"])
        if not said or said[-1].body["message"] != message:
            self.say("waits", message, job=live.id)

    def fail(self, live: LiveJob, message: str) -> None:
        """Ends a job that cannot go on, with the sentence that says why."""
        release = message if self.store.leases.of(live.id) is not None else None
        self.change(live, JobState.FAILED, release=release, why=message, error=message)
        self.on_said(message)

    def vacate(self, live: LiveJob, *, why: str) -> None:
        """Puts a job that no gang holds any more where its user or the last decision wants it."""
        if live.intent == "cancel":
            self.change(live, JobState.CANCELLED, release=why, why=why)
        elif live.intent == "pause":
            self.change(live, JobState.PAUSED, release=why, why=why)
        elif live.state is JobState.MOVING and self.state.is_placed(live):
            row = self.store.jobs.get(live.id)
            if row.lease is not None:
                self.store.leases.release(live.id, lease=row.lease, why=why)
        else:
            self.change(live, JobState.QUEUED, release=why, why=why)
            if not self.state.is_placed(live) and live.number not in self.state.queue:
                self.enqueue(live)  # one that a decision has paused waits already
        self.wants_actions = True

    def requeue(self, live: LiveJob, *, why: str) -> None:
        """Takes a job off the place that was decided for it, and lets it wait for another one."""
        self.state.withdraw(live, self.clock())
        self.note_pause(live)
        if not live.state.is_live:
            if live.requested is None:
                self.enqueue(live)
        elif not self.state.is_held(live):
            self.vacate(live, why=why)

    def gang_ended(
        self,
        gang: LiveGang,
        *,
        why: str,
        died_at: tuple[int, int] | None = None,
        was_killed: bool = False,
        in_order: bool = False,
    ) -> list[LiveJob]:
        """Notes that no process of a gang is left; returns the jobs that it held, vacated.

        Args:
            in_order: its jobs have been saved before.
        """
        if died_at is not None:
            self.store.gangs.note(
                gang.name, gang.epoch, died_at=list(died_at), was_killed=was_killed
            )
        self.store.gangs.change(gang.name, gang.epoch, GangState.ENDED, why=why)
        self.state.gangs.pop(gang.name, None)
        if not self.state.members(gang.name):
            self.state.one_by_one.discard(gang.name)
        self.wants_actions = True
        held = [self.state.jobs[job] for job in gang.members if job in self.state.jobs]
        for live in held:
            if not in_order:
                self._save_soon(live)
            self.vacate(live, why=why)
        return held

    def _save_soon(self, live: LiveJob) -> None:
        if live.saves_soon:
            return
        live.saves_soon = True
        self.remember(live)
        every_s = live.checkpoint_every_s or self.settings.checkpoint_every_s
        self.say(
            "saves_soon",
            f"job {live.name!r} is saved every few seconds at first when it trains again, then "
            f"less and less often, up to every {every_s:g} s: its gang ended without saving it",
            job=live.id,
        )


@dataclass(slots=True)
class Tally:
    """Counts one kind of work since the controller started."""

    count: int = 0
    sum_s: float = 0.0
    last_s: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        self.last_s = seconds
        self.longest_s = max(self.longest_s, seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, in microseconds' precision."""
        return {name: round(value, 6) for name, value in asdict(self).items()}
