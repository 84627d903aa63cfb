"""A service whose jobs are those of a simulated study, whose gangs are fake, on its own clock."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.fake_engine import FakeEngine
from tests.helpers.fake_gang import FakeTimes, FakeWork
from tlora_megatron.planner.group import GroupModel
from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.scheduler.queue import Job
from tlora_megatron.service.control.controller import Controller
from tlora_megatron.service.control.pricing import PlannedBase, Pricing
from tlora_megatron.service.engines.protocol import NodeInfo
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.submission import Submission
from tlora_megatron.service.settings import Settings
from tlora_megatron.service.store import JobState, NewJob, open_store
from tlora_megatron.sim.study import Study
from tlora_megatron.sim.workload import load_mix

EPOCH_S = 1_000_000.0
"""Unix time at which a trace begins: small, so that its times are exact enough."""
SPEEDUP = 600.0
LOOK_S = 0.04 * SPEEDUP


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A job of a trace, as validation would give it."""

    job: str
    document: Mapping[str, Any]
    own: JobLoad
    train_tokens: float
    num_steps: int
    tokens: Mapping[str, str] = field(default_factory=dict)
    from_step: int = 0
    notes: tuple[str, ...] = ()

    def load(self) -> JobLoad:
        """The job as the planner sees it."""
        return self.own


class Jobs:
    """The jobs of a study: accepts what names them, and says what they are to fake gangs."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.jobs: Sequence[Job] = study.workload.jobs
        self._done: list[Accepted] = []

    def load(self, job: Job) -> JobLoad:
        """The drawn load of a job."""
        return self.study.speeds.load_of(job.kind)

    def num_steps(self, job: Job) -> int:
        """Steps of its batch that its tokens are."""
        return max(1, round(job.tokens / self.load(job).batch_tokens))

    def submission(self, job: Job) -> NewJob:
        """The job as a user would submit it."""
        name = f"trace-{job.index}"
        document = {"name": name, "index": job.index}
        made = Submission(name=name, base_model={"path": job.base}, document=document)
        asked = {"gpus": job.num_gpus, "max_slowdown": job.max_slowdown, "priority": job.priority}
        return NewJob(
            name=name,
            document=json.loads(made.to_json()),
            base=job.base,
            key=name,
            schedule=asked,
        )

    def work(self, order: Mapping[str, Any]) -> FakeWork:
        """The work of a job for a fake gang."""
        job = self.jobs[int(order["document"]["index"])]
        return FakeWork(kind=job.kind, tokens=job.tokens, num_steps=self.num_steps(job))

    # The controller's validator

    def submit(self, job_id: str, submission: Submission) -> None:
        """Accepts a job at once."""
        job = self.jobs[int(submission.document["index"])]
        self._done.append(
            Accepted(
                job=job_id,
                document=submission.document,
                own=self.load(job),
                train_tokens=job.tokens,
                num_steps=self.num_steps(job),
            )
        )

    def forget(self, job_id: str) -> None:
        """Nothing is under way."""

    def poll(self) -> list[Accepted]:
        """The accepted jobs."""
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Nothing runs."""


class Replay:
    """A service on a clock of its own."""

    def __init__(self, jobs: Jobs, root: Path, settings: Settings, times: FakeTimes) -> None:
        study = jobs.study
        self.now_s = EPOCH_S
        self.jobs = jobs
        self.home = Home.open(root)
        self._settings = settings
        specs = load_mix(study.mix.name)[1]
        self._models = {name: GroupModel(spec, study.profile) for name, spec in specs.items()}
        shape = study.cluster.shape
        nodes = [
            NodeInfo(node=i, address="", gpus=shape.gpus_per_node) for i in range(shape.num_nodes)
        ]
        self.engine = FakeEngine(
            nodes=nodes,
            speeds=study.speeds,
            work=jobs.work,
            clock=lambda: self.now_s,
            times=times,
            writes=False,
        )
        self.take_over()

    def take_over(self) -> None:
        """Starts a controller on the store, as after a SIGKILL of the one before."""
        self.store = open_store(self.home.store, clock=lambda: self.now_s)
        self.store.lock.take(stale_s=-1.0)
        self.controller = Controller(
            home=self.home,
            store=self.store,
            engine=self.engine,
            pricing=Pricing(lambda section: PlannedBase(model=self._models[section["path"]])),
            validator=self.jobs,
            settings=self._settings,
            clock=lambda: self.now_s,
            on_said=lambda sentence: None,
        )

    def run(self) -> None:
        """Submits each job at its time, and ends when all are over."""
        waiting = list(reversed(self.jobs.jobs))
        total = len(waiting)
        while True:
            due = []
            while waiting and EPOCH_S + waiting[-1].submit_s <= self.now_s:
                due.append(waiting.pop())
            if due:
                self.store.jobs.submit([self.jobs.submission(job) for job in due])
            self.controller.step()
            if not waiting and not self.controller.context.state.jobs:
                return
            arrival_s = EPOCH_S + waiting[-1].submit_s if waiting else float("inf")
            soonest = min(arrival_s, self.engine.next_s(), self.controller.next_s())
            looks = max(1.0, -(-(soonest - self.now_s) // LOOK_S))
            self.now_s += looks * LOOK_S
            if len(due) and len(waiting) % 100 < len(due):
                print(f"{total - len(waiting)} of {total} jobs submitted", file=sys.stderr)

    def completion_s(self) -> dict[int, float]:
        """Seconds from submission to the end of each finished job, by its index."""
        found, after = {}, 0
        while page := self.store.jobs.page(after=after, limit=1000):
            after = page[-1].number
            for row in page:
                index = int(row.name.removeprefix("trace-"))
                if row.state is JobState.FINISHED and row.ended_at is not None:
                    found[index] = row.ended_at - EPOCH_S - self.jobs.jobs[index].submit_s
        return found
