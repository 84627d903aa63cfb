"""Writers and a controller of a store that are SIGKILLed at random, and who watches them.

    python -m tests.helpers.store_chaos writers PLACE FOLDER KILLS SEED
    python -m tests.helpers.store_chaos controllers PLACE FOLDER KILLS SEED

All are forked from one process that has the imports done. The gangs are not processes here: the
watcher plays them, from files of commands and events such as engines keep, and cries out at what
must never happen. The last line says in JSON what was counted.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.launch import HANG_S
from tlora_megatron.service.messages import Command, GangEvent, GangSpec
from tlora_megatron.service.store import (
    Gang,
    GangState,
    Job,
    JobState,
    NewJob,
    Store,
    open_store,
)

GANGS, SEATS = 3, 2


def new_job(key: str) -> NewJob:
    """A job that is its key."""
    return NewJob(name=key, document={"key": key}, base="tiny", key=key)


# --- processes to be killed


@dataclass
class Child:
    """A forked process and the pipe on which it acknowledges what is committed."""

    process: int
    pipe: int
    heard: bytes = b""

    @classmethod
    def fork(cls, work: Callable[[Callable[[str], None]], None]) -> Child:
        """Runs `work(acknowledge)` in a child."""
        reader, writer = os.pipe()
        process = os.fork()
        if process:
            os.close(writer)
            return cls(process, reader)
        status = 1
        try:
            os.close(reader)
            work(lambda line: os.write(writer, f"{line}\n".encode()) and None)
            status = 0
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(status)

    def listen(self, for_s: float) -> None:
        """Reads what is said within a time."""
        until = time.monotonic() + for_s
        while (left := until - time.monotonic()) > 0:
            if select.select([self.pipe], [], [], left)[0]:
                said = os.read(self.pipe, 65536)
                if not said:
                    return
                self.heard += said

    def is_over(self) -> bool:
        """Whether the process ended by itself."""
        ended, status = os.waitpid(self.process, os.WNOHANG)
        assert status == 0, "a child failed by itself"
        return bool(ended)

    def end(self) -> list[str]:
        """Kills the process; returns all that it acknowledged in whole lines."""
        if not self.is_over():
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        while said := os.read(self.pipe, 65536):
            self.heard += said
        os.close(self.pipe)
        return self.heard.decode().split("\n")[:-1]


# --- writers


def writers(place: str, kills: int, rng: random.Random) -> dict[str, int]:
    """Four writers at a time submit until they are killed; nothing acknowledged is lost."""
    open_store(place).close()
    acknowledged: list[str] = []
    for begin in range(0, kills, 4):
        children = [
            Child.fork(lambda tell, number=number: _submit(place, f"w{number}", tell))
            for number in range(begin, min(begin + 4, kills))
        ]
        for child in children:
            while b"\n" not in child.heard:
                child.listen(0.01)
        for child in rng.sample(children, len(children)):
            child.listen(rng.uniform(0.0, 0.1))
            acknowledged += child.end()
    with open_store(place) as store:
        documents = _all_documents(store)
        keys = sorted(document["key"] for document in documents.values())
        assert len(set(keys)) == len(keys), "a key made two jobs"
        assert not set(acknowledged) - set(keys), "an acknowledged submit is lost"
        told = Counter(event.job for event in _all_events(store) if event.kind == "submitted")
        assert told == dict.fromkeys(documents, 1), "jobs and events fell apart"
        again = store.jobs.submit([new_job(key) for key in acknowledged])
        assert not any(job.is_new for job in again)
    return {"acknowledged": len(acknowledged), "jobs": len(keys), "kills": kills}


def _submit(place: str, name: str, tell: Callable[[str], None]) -> None:
    with open_store(place) as store:
        for number in range(10**9):
            store.jobs.submit([new_job(f"{name}-{number}")])
            tell(f"{name}-{number}")


def _all_documents(store: Store) -> dict[str, dict[str, str]]:
    return store.jobs.documents([job.id for job in store.jobs.page(limit=10**6)])


def _all_events(store: Store) -> list:
    return store.events.after(0, limit=10**6)


# --- the gangs' side


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
        """Adds an event."""
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
        """Each job steps; some end."""
        for job in list(self.members):
            self.members[job] += 1
            if rng.random() < 0.03:
                self.tell("ended", job, step=self.members.pop(job))
                trains[job] -= 1

    def die(self, trains: Counter[str]) -> None:
        """Ends with all its jobs."""
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


# --- the controller


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
                if self.store.gangs.hear(event):
                    self.on(gang, event)

    def on(self, gang: Gang, event: GangEvent) -> None:
        """What an event causes."""
        jobs, job = self.store.jobs, event.job or ""
        if event.kind == "started":
            self.store.gangs.change(gang.name, gang.epoch, GangState.RUNNING)
        elif event.kind == "applied":
            self.store.commands.mark_applied(gang.name, gang.epoch, event.body["seq"])
        elif event.kind == "joined":
            jobs.change(job, JobState.RUNNING, expected=JobState.STARTING)
        elif event.kind == "left":
            jobs.change(job, JobState.QUEUED, expected=JobState.MOVING, release="left")
        elif event.kind == "ended":
            jobs.change(job, JobState.FINISHED, release="ended")
        elif event.kind == "died":
            self.store.gangs.change(gang.name, gang.epoch, GangState.ENDED, why="died")
            for lease in self.store.leases.held_by(gang.name, gang.epoch):
                jobs.change(lease.job, JobState.QUEUED, release="its gang died")

    def decide(self) -> int:
        """Queues, places and moves jobs; returns how many are not over."""
        unfinished = self.store.load().jobs
        room = dict.fromkeys(self.store.gangs.cursor(), SEATS)
        room.update({held: room[held] - 1 for held in map(_gang_of, unfinished) if held in room})
        for job in unfinished:
            if job.state is JobState.VALIDATING:
                self.store.jobs.change(job.id, JobState.QUEUED, expected=JobState.VALIDATING)
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
            self.store.jobs.change(job.id, JobState.STARTING, expected=JobState.QUEUED)
            command = self.store.commands.write(gang, epoch, "join", job=job.id)
        self.post(command)

    def leave(self, job: Job) -> None:
        """Takes a job out, to be queued again."""
        with self.store.transaction():
            self.store.jobs.change(job.id, JobState.MOVING, expected=JobState.RUNNING)
            command = self.store.commands.write(*_gang_of(job), "leave", job=job.id)
        self.post(command)


def _gang_of(job: Job) -> tuple[str, int]:
    return job.gang or "", job.gang_epoch or 0


def controllers(place: str, folder: Path, kills: int, rng: random.Random) -> dict[str, int]:
    """A controller is killed and followed by the next while jobs come; then all are finished."""
    open_store(place).close()
    acknowledged: list[str] = []
    played: dict[str, PlayedGang] = {}
    trains: Counter[str] = Counter()
    for number in range(kills):
        controller = Child.fork(lambda _: Controller(place, folder).run(lambda: False))
        writer = Child.fork(lambda tell, number=number: _submit_some(place, f"c{number}", tell))
        left_s = rng.uniform(0.0, 0.6)
        while left_s > 0:
            began = time.monotonic()
            play(folder, played, trains, rng)
            writer.listen(0.005)
            # Starting is slow where the machine is busy: the time counts from the first submit.
            left_s -= (time.monotonic() - began) * bool(writer.heard)
        acknowledged += writer.end()
        controller.end()
        with open_store(place) as store:
            check(store)
    last = Child.fork(lambda _: Controller(place, folder).run(lambda: True))
    deadline = time.monotonic() + HANG_S
    while not last.is_over():
        play(folder, played, trains, rng)
        assert time.monotonic() < deadline, "jobs were left over"
        time.sleep(0.002)
    with open_store(place) as store:
        states = check(store)
        assert set(states.values()) == {JobState.FINISHED.value}
        keys = [document["key"] for document in _all_documents(store).values()]
        assert len(keys) == len(set(keys)) == len(states)
        assert not set(acknowledged) - set(keys), "an acknowledged submit is lost"
        moves = sum(event.kind == "granted" for event in _all_events(store))
    assert not +trains
    return {"kills": kills, "jobs": len(keys), "gangs": len(played), "leases": moves}


def _submit_some(place: str, name: str, tell: Callable[[str], None]) -> None:
    with open_store(place) as store:
        for number in range(4):
            store.jobs.submit([new_job(f"{name}-{number}")])
            tell(f"{name}-{number}")


def check(store: Store) -> dict[str, str]:
    """What holds at every moment; returns the states of all jobs."""
    states: dict[str, str] = {}
    holder: dict[str, str | None] = {}
    epochs: Counter[str] = Counter()
    for event in _all_events(store):
        if event.kind == "submitted":
            states[event.job], holder[event.job] = "validating", None
        elif event.kind == "state":
            assert states[event.job] == event.body["from"], "a change without its event"
            states[event.job] = event.body["to"]
        elif event.kind == "granted":
            epochs[event.job] += 1
            assert holder[event.job] is None, f"{event.job} has two leases"
            assert event.body["lease"] == epochs[event.job]
            holder[event.job] = event.gang
        elif event.kind == "released":
            assert holder[event.job] == event.gang
            holder[event.job] = None
    for job in store.jobs.page(limit=10**6):
        assert states[job.id] == job.state, "a state without its event"
        assert holder[job.id] == job.gang
        assert job.state.is_live == (job.lease is not None)
    return states


def main(argv: list[str]) -> None:
    """Runs one kind of chaos."""
    kind, place, folder, kills, seed = argv
    rng = random.Random(int(seed))
    if kind == "writers":
        print(json.dumps(writers(place, int(kills), rng)))
    else:
        print(json.dumps(controllers(place, Path(folder), int(kills), rng)))


if __name__ == "__main__":
    main(sys.argv[1:])
