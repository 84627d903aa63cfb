"""A service in one process: controller, store and fake gangs on one clock that tests set."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.fake_engine import FakeEngine
from tests.helpers.fake_gang import FakeGang, FakeTimes, FakeWork
from tests.helpers.floor_model import FloorModel
from tests.helpers.stored_jobs import ValidatorHere
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.service.control.controller import Controller
from tlora_megatron.service.control.pricing import MemoryShares, Pricing
from tlora_megatron.service.engines.protocol import NodeInfo
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.submission import Submission
from tlora_megatron.service.settings import Settings
from tlora_megatron.service.store import Job, JobState, NewJob, Store, open_store

TOKENS = 100
"""Rows of every sequence."""


@dataclass(frozen=True, kw_only=True)
class FloorCost:
    """Costs of a base of `FloorModel`: nothing to move, and any plan will do."""

    model: FloorModel
    weights_bytes: float = 0.0
    shares: MemoryShares | None = None
    most_jobs: int | None = None
    """That join a gang which runs; None = any number."""

    def state_bytes(self, load: JobLoad) -> float:
        return 0.0

    def plan(self, loads: Sequence[JobLoad], num_gpus: int) -> Plan | None:
        return None

    def holds(self, loads: Sequence[JobLoad], plan: Plan | None) -> bool:
        """Everything fits, but too many jobs need a gang that starts with them."""
        return self.most_jobs is None or len(loads) <= self.most_jobs

    def memory(self, loads: Sequence[JobLoad], plan: Plan | None) -> MemoryShares | None:
        return self.shares


@dataclass(frozen=True, kw_only=True)
class Read:
    """A job whose data was read; what it is stands in its document."""

    job: str
    document: Mapping[str, Any]
    tokens: Mapping[str, str] = field(default_factory=dict)
    from_step: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        return int(self.document["max_steps"])

    @property
    def train_tokens(self) -> int:
        return self.num_steps * int(self.document["batch_size"]) * TOKENS

    def load(self) -> JobLoad:
        return load_of(self.document)


def load_of(document: Mapping[str, Any]) -> JobLoad:
    return JobLoad(
        name="job",
        rank=16,
        batch_size=int(document["batch_size"]),
        lengths=LengthHistogram.single(TOKENS),
    )


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder in memory where there is one: a disk that flushes every change takes most time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


class LiveService:
    """A service whose time a test moves."""

    def __init__(
        self,
        root: Path,
        *,
        nodes: int = 1,
        gpus: int = 1,
        times: FakeTimes | None = None,
        writes: bool = True,
        cost: FloorCost | None = None,
        begin_s: float = 1_000_000.0,
        on_order: Callable[[Mapping[str, Any]], None] = lambda order: None,
        **settings: Any,
    ) -> None:
        self._cost = cost or FloorCost(model=FloorModel())
        self.now_s = begin_s
        self.home = Home.open(root)
        self.settings = Settings(**{"decide_in_thread": False, "dwell_s": 0.0, **settings})
        self.said: list[str] = []
        self._on_order = on_order
        self.store = self._open()
        self._speeds = Speeds({"base": FloorModel()})
        self.engine = FakeEngine(
            nodes=[NodeInfo(node=i, address="", gpus=gpus) for i in range(nodes)],
            speeds=self._speeds,
            work=self._work,
            clock=lambda: self.now_s,
            times=times,
            writes=writes,
        )
        self.controller = self._controller()

    def _open(self) -> Store:
        store = open_store(self.home.store, clock=lambda: self.now_s)
        store.lock.take(stale_s=-1.0)
        return store

    def _controller(self) -> Controller:
        return Controller(
            home=self.home,
            store=self.store,
            engine=self.engine,
            pricing=Pricing(lambda section: self._cost),
            validator=ValidatorHere(lambda job, one: Read(job=job, document=one.document)),
            settings=self.settings,
            clock=lambda: self.now_s,
            on_said=self.said.append,
        )

    def _work(self, order: Mapping[str, Any]) -> FakeWork:
        self._on_order(order)
        document = order["document"]
        read = Read(job="", document=document)
        kind = self._speeds.kind("base", read.load())
        return FakeWork(kind=kind, tokens=read.train_tokens, num_steps=read.num_steps)

    def submit(
        self, name: str, *, steps: int, batch: int = 5, tenant: str = "local", **schedule: Any
    ) -> str:
        """Submits a job of steps that take a second alone; returns its id."""
        document = {"name": name, "batch_size": batch, "max_steps": steps}
        submission = Submission(name=name, base_model={"path": "base"}, document=document)
        new = NewJob(
            name=name,
            document=json.loads(submission.to_json()),
            base="base",
            key=name,
            schedule={"max_slowdown": 2.0, **schedule},
        )
        return self.store.jobs.submit([new], tenant=tenant)[0].id

    def job(self, job: str) -> Job:
        return self.store.jobs.get(job)

    def states(self) -> dict[str, str]:
        return {job.name: job.state.value for job in self.store.jobs.page(limit=1000)}

    def run(self, seconds: float = float("inf"), until: Callable[[], bool] | None = None) -> None:
        """Lets time pass, from one thing that happens to the next, until all jobs are over."""
        end_s = self.now_s + min(seconds, 1e7)
        while self.now_s <= end_s:
            self.controller.step()
            if until is not None and until():
                return
            if seconds == float("inf") and until is None and self.is_over:
                return
            soonest = min(self.engine.next_s(), self.controller.next_s())
            self.now_s = max(self.now_s + 1e-3, min(soonest, end_s + 1e-3))
        if seconds == float("inf"):
            raise AssertionError(f"all jobs must be over by now, got {self.states()}")
        self.now_s = end_s

    @property
    def gang(self) -> FakeGang:
        """The oldest gang that lives, or else the first."""
        gangs = list(self.engine.all_gangs.values())
        return next((gang for gang in gangs if gang.alive), gangs[0])

    @property
    def is_over(self) -> bool:
        return all(JobState(state).is_over for state in self.states().values())

    def restart(self) -> None:
        """Ends the controller as SIGKILL would, and starts another one."""
        self.store.close()
        self.store = self._open()
        self.controller = self._controller()

    def adapter(self, job: str) -> str:
        return (self.home.job(job) / "adapter/adapter.txt").read_text()

    def sentences(self, what: str) -> list[str]:
        """The controller's sentences on one thing."""
        events = self.store.events.after(0, kinds=["said"])
        return [event.body["message"] for event in events if event.body["what"] == what]


def one_job(root: Path, steps: int = 60, run_s: float = 10, **more: Any) -> tuple[LiveService, str]:
    """A service in which the job `one` has trained for some seconds, and the job's id."""
    service = LiveService(root, **more)
    job = service.submit("one", steps=steps)
    service.run(run_s)
    return service, job
