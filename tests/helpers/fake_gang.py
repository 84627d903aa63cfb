"""One gang that only pretends: its jobs, their steps, and what it tells of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tlora_megatron.files import read_json, write_atomic, write_json
from tlora_megatron.service.home import make_folder, read_lease
from tlora_megatron.service.messages import UNSTORED_SEQ, Command, EventKind, GangEvent, GangSpec

if TYPE_CHECKING:
    from tests.helpers.fake_engine import FakeEngine

ADAPTER = "adapter/adapter.txt"
_CHECKPOINT = "checkpoints/newest.json"
_DONE = 1e-6
_ROUNDS = 10
"""Told of in every report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeTimes:
    """Seconds that a gang's doings take."""

    start_s: float = 1.0
    prepare_s: float = 0.2
    boundary_s: float = 0.05
    """From a command to the boundary of rounds at which it is carried out."""
    stall_s: float = 0.01
    """Pause of a gang when a job joins."""
    report_s: float = 2.0
    checkpoint_s: float = 60.0
    noise: float = 0.0
    """Relative standard deviation of a gang's speed around the predicted one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeWork:
    """The work of a job, as far as a fake gang does it."""

    kind: int
    """The kind of a job in the engine's own `Speeds`."""
    tokens: float
    num_steps: int


@dataclass(kw_only=True, slots=True)
class FakeJob:
    """A job in a fake gang."""

    name: str
    work: FakeWork
    lease: int
    phase: Literal["preparing", "prepared", "training"] = "preparing"
    wants_in: bool = False
    """It was told to join before it was prepared."""
    step: int = 0
    part: float = 0.0
    """Tokens of the step that is not done."""
    digest: str = ""
    tokens_per_s: float = 0.0
    told: int = 0
    """Last step that was told."""
    first_round: bool = False
    hold_at: tuple[int, ...] = ()
    is_held: bool = False

    @property
    def last_step(self) -> int:
        """The step behind which it waits or ends."""
        return self.hold_at[0] if self.hold_at else self.work.num_steps

    @property
    def step_tokens(self) -> float:
        return self.work.tokens / self.work.num_steps

    @property
    def left_s(self) -> float:
        left = (self.last_step - self.step) * self.step_tokens - self.part
        can = self.tokens_per_s and not self.is_held
        return max(0.0, left) / self.tokens_per_s if can else float("inf")


class FakeGang:
    """A gang of fake processes."""

    def __init__(self, spec: GangSpec, world: FakeEngine, *, factor: float) -> None:
        self.spec = spec
        self.factor = factor
        """Its speed over the predicted one."""
        self.alive, self.hangs = True, False
        self.events: list[GangEvent] = []
        self.jobs: dict[str, FakeJob] = {}
        self._world = world
        self._applied = 0
        self._commands: dict[int, Command] = {}
        self._since = world.now()
        self._version = 0
        self._ready = False
        self._pause_until = 0.0
        self._rounds = 0
        world.later(world.times.start_s, self, self._start)

    # What it tells

    def tell(self, kind: EventKind, job: str | None = None, **body: Any) -> None:
        number = len(self.events) + 1
        self.events.append(
            GangEvent(
                gang=self.spec.gang,
                epoch=self.spec.epoch,
                number=number,
                at=self._world.now(),
                kind=kind,
                job=job,
                body=body,
            )
        )

    def _start(self) -> None:
        self._ready = True
        self.tell("started", seconds={"all": self._world.times.start_s})
        self._world.later(self._world.times.report_s, self, self._report)
        self._world.later(self._world.times.checkpoint_s, self, self._checkpoint)
        if self._commands:
            self._world.later(0.0, self, self._obey)

    # What it is told

    def post(self, command: Command) -> None:
        """Takes a command; one that was carried out is dropped."""
        if command.seq == UNSTORED_SEQ:
            self._applied = command.seq - 1
        if command.seq > self._applied and command.seq not in self._commands:
            self._commands[command.seq] = command
            if self._ready:
                self._world.later(self._world.times.boundary_s, self, self._obey)

    def _obey(self) -> None:
        while (command := self._commands.pop(self._applied + 1, None)) is not None:
            self._applied = command.seq
            self.pass_time()
            getattr(self, f"_do_{command.kind}")(command)
            self.tell("applied", seq=command.seq)
            if not self.alive:
                return

    def _do_prepare(self, command: Command) -> None:
        job = str(command.job)
        own = FakeJob(
            name=str(command.body.get("name", job)),
            work=self._world.read(command.body),
            lease=int(command.body["lease"]),
            hold_at=tuple(command.body.get("hold_at", ())),
        )
        self.jobs[job] = own
        self._world.later(self._world.times.prepare_s, self, lambda: self._prepared(job, own))

    def _prepared(self, job: str, own: FakeJob) -> None:
        if self.jobs.get(job) is not own:
            return
        own.step, own.digest = self._read(job, own)
        own.told, own.phase = own.step, "prepared"
        self.tell("prepared", job, digest="", num_steps=own.work.num_steps, from_step=own.step)
        if own.wants_in:
            self.pass_time()
            self._let_in(job, own)

    def _do_join(self, command: Command) -> None:
        own = self.jobs.get(str(command.job))
        if own is None:
            self.tell("refused", command.job, error="it was never prepared")
        elif own.phase == "prepared":
            self._let_in(str(command.job), own)
        else:
            own.wants_in = True

    def _let_in(self, job: str, own: FakeJob) -> None:
        own.phase, own.first_round, own.wants_in = "training", True, False
        self._world.trains(job, self)
        self._pause_until = self._world.now() + self._world.times.stall_s
        self.tell("joined", job, round=0, from_step=own.step, stall_s=self._world.times.stall_s)
        self._changed()

    def _do_leave(self, command: Command) -> None:
        job = str(command.job)
        if job in self.jobs:
            self._let_go(job, saves=bool(command.body.get("save")))
            self._changed()

    def _do_save(self, command: Command) -> None:
        self._checkpoint_all()

    def _do_renew(self, command: Command) -> None:
        pass

    def _do_stop(self, command: Command) -> None:
        for job in list(self.jobs):
            self._let_go(job, saves=bool(command.body.get("save")))
        self.tell("stopped")
        self.alive = False

    def _let_go(self, job: str, *, saves: bool) -> None:
        own = self.jobs.pop(job)
        if saves and own.phase == "training":
            self._save(job, own)
        self._world.trains(job, None)
        self.tell("left", job, step=own.step)

    # What it does

    def pass_time(self) -> None:
        now = self._world.now()
        begin = max(self._since, min(now, self._pause_until))
        for own in self._training().values():
            self._train(own, own.tokens_per_s * max(0.0, now - begin))
        self._since = now

    def _train(self, own: FakeJob, tokens: float) -> None:
        own.part += 0.0 if own.is_held else tokens
        steps = int((own.part + _DONE * own.step_tokens) / own.step_tokens)
        steps = max(0, min(steps, own.last_step - own.step))
        own.part = max(0.0, own.part - steps * own.step_tokens)
        if self._world.writes:
            for step in range(own.step, own.step + steps):
                own.digest = hashlib.sha256(f"{own.digest} {step}".encode()).hexdigest()
        own.step += steps

    def _training(self) -> dict[str, FakeJob]:
        return {job: own for job, own in self.jobs.items() if own.phase == "training"}

    def _changed(self) -> None:
        """Gives the members the speeds of their new group, and plans its next end."""
        training = self._training()
        if not training:
            return
        if len(training) > 1 and any(
            own.first_round and job in self._world.hungry for job, own in training.items()
        ):
            self.die("CUDA out of memory", out_of_memory=True)
            return
        kinds = tuple(sorted(own.work.kind for own in training.values()))
        rates = self._world.rates(kinds, self.spec.world_size)
        if rates is None:
            self.die("CUDA out of memory", out_of_memory=True)
            return
        for own in training.values():
            own.tokens_per_s = rates[own.work.kind] * self.factor
        self._plan_end()

    def _plan_end(self) -> None:
        self._version += 1
        version = self._version
        wait_s = max(0.0, self._pause_until - self._world.now())
        soonest = min((own.left_s for own in self._training().values()), default=float("inf"))
        if soonest < float("inf"):
            self._world.later(wait_s + soonest, self, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self.pass_time()
        for job, own in self._training().items():
            if own.hold_at and own.step >= own.last_step and not own.is_held:
                own.is_held, own.part = True, 0.0
                scores = {"eval_loss": self._world.scores.get(own.name)}
                self.tell("at_rung", job, step=own.step, scores=scores)
        over = [job for job, own in self._training().items() if own.step >= own.work.num_steps]
        for job in over:
            own = self.jobs.pop(job)
            self.tell("stepped", job, step=own.step, loss=0.5, lr=1e-4, tokens=0)
            self._export(job, own)
            self._world.trains(job, None)
            self.tell("ended", job, status="finished", reason=None, step=own.step)
        if over:
            self._changed()
        else:
            self._plan_end()

    def _report(self) -> None:
        self.pass_time()
        training = self._training()
        for job, own in training.items():
            if own.step > own.told:
                own.told, own.first_round = own.step, False
                self.tell("stepped", job, step=own.step, loss=1.0 / own.step, lr=1e-4, tokens=0)
        if training:
            rates = {job: own.tokens_per_s for job, own in training.items()}
            self._rounds += _ROUNDS
            self.tell("round", rounds=self._rounds, tokens_per_s=sum(rates.values()), jobs=rates)
        self._world.later(self._world.times.report_s, self, self._report)

    def _checkpoint(self) -> None:
        self._checkpoint_all()
        self._world.later(self._world.times.checkpoint_s, self, self._checkpoint)

    def _checkpoint_all(self) -> None:
        self.pass_time()
        for job, own in self._training().items():
            self._save(job, own)

    def die(self, reason: str, *, out_of_memory: bool = False, was_killed: bool = False) -> None:
        """Ends by itself or as if a process had been killed; what was not saved is lost."""
        newcomers = [job for job, own in self._training().items() if own.first_round]
        for job in self.jobs:
            self._world.trains(job, None)
        self.alive = False
        facts = {"out_of_memory": out_of_memory, "newcomers": newcomers}
        self.tell("died", rank=0, reason=reason, was_killed=was_killed, **facts)

    # Its jobs' folders

    def _folder(self, job: str) -> Path:
        return Path(self.spec.root) / "jobs" / job

    def _may_write(self, job: str, own: FakeJob) -> bool:
        lease = read_lease(self._folder(job))
        return lease is not None and (lease.gang, lease.epoch, lease.lease) == (
            self.spec.gang,
            self.spec.epoch,
            own.lease,
        )

    def _read(self, job: str, own: FakeJob) -> tuple[int, str]:
        if not self._world.writes:
            return self._world.disk.get(job, 0), ""
        found = read_json(self._folder(job) / _CHECKPOINT)
        return (0, own.name) if found is None else (int(found["step"]), str(found["digest"]))

    def _save(self, job: str, own: FakeJob) -> None:
        if not self._world.writes:
            self._world.disk[job] = own.step
        elif self._may_write(job, own):
            path = self._folder(job) / _CHECKPOINT
            make_folder(path.parent)
            write_json(path, {"step": own.step, "digest": own.digest})
        self.tell("saved", job, step=own.step)

    def _export(self, job: str, own: FakeJob) -> None:
        if self._world.writes and self._may_write(job, own):
            path = self._folder(job) / ADAPTER
            make_folder(path.parent)
            write_atomic(path, own.digest.encode())
