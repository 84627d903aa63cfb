"""The least service over a store: a controller, and gangs that are played from files.

The gangs are no processes: whoever plays them reads files of commands and writes files of events,
such as engines keep, and cries out at what must never happen.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tlora_megatron.service.messages import Command, GangEvent, GangSpec
from tlora_megatron.service.store import Gang, GangState, Job, JobState, open_store

GANGS, SEATS = 3, 2


def append(path: Path, line: str) -> None:
    """Adds a line, whole or not at all."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


@dataclass
class PlayedGang:
    """A gang as the watcher plays it: it applies commands in order and tells of it."""

    folder: Path
    name: str
    epoch: int
    applied: int = 0
    told: int = 0
    members: dict[str, int] = field(default_factory=dict)
    """Steps of the jobs that train in it."""
    is_dead: bool = False

    @property
    def files(self) -> tuple[Path, Path]:
        """Its commands and its events."""
        stem = f"{self.name}-{self.epoch}"
        return self.folder / f"{stem}.commands", self.folder / f"{stem}.events"

    def tell(self, kind: str, job: str | None = None, **body: object) -> None:
        self.told += 1
        event = GangEvent(
            gang=self.name,
            epoch=self.epoch,
            number=self.told,
            at=0.0,
            kind=kind,
            job=job,
            body=body,
        )
        append(self.files[1], event.to_json())

    def read(self, trains: Counter[str]) -> None:
        """Applies what came; commands that were posted twice once."""
        for line in self.files[0].read_text().splitlines():
            command = Command.from_json(line)
            if command.seq <= self.applied:
                continue
            assert command.seq == self.applied + 1, f"gap before {command}"
            self.applied = command.seq
            if command.kind == "join":
                trains[command.job] += 1
                assert trains[command.job] == 1, f"{command.job} is in two gangs"
                self.members[command.job] = 0
                self.tell("joined", command.job)
            elif command.kind == "leave" and command.job in self.members:
                del self.members[command.job]
                trains[command.job] -= 1
                self.tell("left", command.job)
            self.tell("applied", seq=command.seq)

    def step(self, trains: Counter[str], rng: random.Random) -> None:
        for job in list(self.members):
            self.members[job] += 1
            if rng.random() < 0.03:
                self.tell("ended", job, step=self.members.pop(job))
                trains[job] -= 1

    def die(self, trains: Counter[str]) -> None:
        trains.subtract(list(self.members))
        self.members.clear()
        self.is_dead = True
        self.tell("died", reason="killed")


def play(folder: Path, played: dict[str, PlayedGang], trains: Counter[str], rng: random.Random):
    """Lets every gang that was started do a little."""
    for path in folder.glob("*.commands"):
        if path.stem not in played:
            name, _, epoch = path.stem.rpartition("-")
            played[path.stem] = PlayedGang(folder, name, int(epoch))
            played[path.stem].tell("started")
    for gang in played.values():
        if not gang.is_dead:
            gang.read(trains)
            gang.step(trains, rng)
            if rng.random() < 0.002:
                gang.die(trains)


class Controller:
    """The least that a controller does: all it knows is in the store."""

    def __init__(self, place: str, folder: Path) -> None:
        self.folder, self.rng = folder, random.Random()
        self.store = open_store(place)
        self.store.lock.take()
        found = self.store.load()
        for gang in found.gangs:
            self.start(gang)
        for command in found.commands:
            self.post(command)

    def start(self, gang: Gang) -> None:
        """Starts a gang, which does nothing to one that is there."""
        (self.folder / f"{gang.name}-{gang.epoch}.commands").touch()

    def post(self, command: Command) -> None:
        """Hands a command over, perhaps not for the first time."""
        append(self.folder / f"{command.gang}-{command.epoch}.commands", command.to_json())

    def run(self, is_over: Callable[[], bool]) -> None:
        """Works until all jobs are over and nothing more is submitted."""
        while True:
            gangs = self.store.gangs.live()
            for name in {f"g{n}" for n in range(GANGS)} - {gang.name for gang in gangs}:
                self.add(name)
            for gang in gangs:
                self.listen(gang)
            done = is_over()
            if not self.decide() and done:
                return
            self.store.lock.beat()

    def add(self, name: str) -> None:
        """Starts a gang under a name whose last one is gone."""
        spec = {"base_model": {}, "parallel": {}, "run": {}, "gpus": ((0, 0),), "root": "/"}
        epoch = self.store.gangs.next_epoch(name)
        self.start(self.store.gangs.add(GangSpec(gang=name, epoch=epoch, **spec)))

    def listen(self, gang: Gang) -> None:
        """Each event and what it causes is one change."""
        path = self.folder / f"{gang.name}-{gang.epoch}.events"
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines[gang.heard :]:
            event = GangEvent.from_json(line)
            with self.store.transaction():
                if self.store.gangs.hear([event]).new:
                    self.on(gang, event)

    def on(self, gang: Gang, event: GangEvent) -> None:
        """Carries out what an event causes."""
        jobs, job = self.store.jobs, event.job or ""
        if event.kind == "started":
            self.store.gangs.change(gang.name, gang.epoch, GangState.RUNNING)
        elif event.kind == "applied":
            self.store.commands.mark_applied(gang.name, gang.epoch, event.body["seq"])
        elif event.kind == "joined":
            jobs.change(job, JobState.RUNNING)
        elif event.kind == "left":
            jobs.change(job, JobState.QUEUED, release="left")
        elif event.kind == "ended":
            jobs.change(job, JobState.FINISHED, release="ended")
        elif event.kind == "died":
            self.store.gangs.change(gang.name, gang.epoch, GangState.ENDED, why="died")
            for lease in self.store.leases.all():
                if (lease.gang, lease.gang_epoch) == (gang.name, gang.epoch):
                    jobs.change(lease.job, JobState.QUEUED, release="its gang died")

    def decide(self) -> int:
        """Queues, places and moves jobs; returns how many are not over."""
        unfinished = self.store.load().jobs
        room = dict.fromkeys(self.store.gangs.cursor(), SEATS)
        room.update({held: room[held] - 1 for held in map(_gang_of, unfinished) if held in room})
        for job in unfinished:
            if job.state is JobState.VALIDATING:
                self.store.jobs.change(job.id, JobState.QUEUED)
            elif job.state is JobState.QUEUED and (free := [g for g in room if room[g] > 0]):
                chosen = self.rng.choice(free)
                room[chosen] -= 1
                self.join(job, *chosen)
            elif job.state is JobState.RUNNING and self.rng.random() < 0.02:
                self.leave(job)
        return len(unfinished)

    def join(self, job: Job, gang: str, epoch: int) -> None:
        """Gives a job to a gang: lease, state and command are one change, the posting follows."""
        with self.store.transaction():
            self.store.leases.grant(job.id, gang, epoch)
            self.store.jobs.change(job.id, JobState.STARTING)
            command = self.store.commands.write(gang, epoch, "join", job=job.id)
        self.post(command)

    def leave(self, job: Job) -> None:
        """Takes a job out, to be queued again."""
        with self.store.transaction():
            self.store.jobs.change(job.id, JobState.MOVING)
            command = self.store.commands.write(*_gang_of(job), "leave", job=job.id)
        self.post(command)


def _gang_of(job: Job) -> tuple[str, int]:
    return job.gang or "", job.gang_epoch or 0
