"""A controller as small as can be: one gang, its jobs, and a new start after every death."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.launch import HANG_S, REPO
from tlora_megatron.service.engines.base import GangEngine
from tlora_megatron.service.home import Home, Lease, make_folder, read_lease, write_lease
from tlora_megatron.service.messages import Command, GangEvent, GangSpec, JobOrder

QUICKSTART = REPO / "configs" / "quickstart.yaml"
_LOOK_S = 0.01


@dataclass(kw_only=True)
class DrivenJob:
    order: JobOrder
    state: str = "waiting"
    losses: dict[int, float] = field(default_factory=dict)
    ended: Mapping[str, Any] | None = None
    heard_s: dict[str, float] = field(default_factory=dict)
    """When the last event of each kind was read, by `time.perf_counter`."""


@dataclass(kw_only=True)
class _Left:
    """An epoch that another one takes over from."""

    epoch: int
    posted: int
    seen: int
    holds: set[str]
    """Jobs that are still in it."""


class GangDriver:
    """Starts a gang on an engine and drives jobs through it.

    Args:
        places: node and worker slot of every rank, or how many ranks sit on the first node.
        exact: steps that a restarted gang takes again must have the losses that they had, as they
            do on CPUs, and on GPUs with `run.deterministic`.
        more: further fields of `GangSpec`: base_model, parallel, run, lease_s.
    """

    def __init__(
        self,
        engine: GangEngine,
        root: Path,
        places: int | Sequence[tuple[int, int]],
        *,
        exact: bool = True,
        **more: Any,
    ) -> None:
        self._exact = exact
        self.engine = engine
        self.home = Home.open(root)
        self.jobs: dict[str, DrivenJob] = {}
        self.events: list[GangEvent] = []
        self.deaths: list[GangEvent] = []
        self.restarts = True
        self.answered = 0
        """Number of the last event that a controller before this one has answered."""
        self.epoch = 0
        self.posted = 0
        """Number of the epoch's last command."""
        self.seen = 0
        """Number of the epoch's last event that was read."""
        self._more = more
        on_first = [(0, slot) for slot in range(places)] if isinstance(places, int) else places
        self._places = tuple(on_first)
        self.heard_s: dict[str, float] = {}
        self._left: _Left | None = None

    def start(self, **more: Any) -> GangSpec:
        """Starts the next epoch; all jobs that have not ended will join it."""
        self._more |= more
        self.epoch += 1
        self.posted = self.seen = 0
        spec = GangSpec(
            gang="g",
            epoch=self.epoch,
            gpus=self._places,
            root=str(self.home.root),
            **self._more,
        )
        self.engine.start(spec)
        return spec

    def hand_over(self, **more: Any) -> None:
        """Starts the next epoch beside the present one; each job moves to it once it is saved."""
        holds = {name for name, job in self.jobs.items() if job.ended is None}
        for job in self.jobs:
            if job in holds:
                self.post("leave", job, {"save": True, "why": "move"})
        left = _Left(epoch=self.epoch, posted=self.posted, seen=self.seen, holds=holds)
        self.start(**more)
        self._left = left

    def submit(self, job: str, document: Mapping[str, Any], **more: Any) -> DrivenJob:
        order = JobOrder(job=job, name=job, document=document, lease=0, **more)
        self.jobs[job] = DrivenJob(order=order)
        make_folder(self.home.job(job))
        if self._has_started:
            self._prepare(job)
        return self.jobs[job]

    @property
    def _has_started(self) -> bool:
        return any(e.kind == "started" and e.epoch == self.epoch for e in self.events)

    def post(
        self, kind: str, job: str | None = None, body: Mapping[str, Any] | None = None
    ) -> None:
        self.posted += 1
        self.engine.post(
            Command(
                gang="g",
                epoch=self.epoch,
                seq=self.posted,
                kind=kind,  # type: ignore[arg-type]
                job=job,
                body=body or {},
            )
        )

    def poll(self) -> list[GangEvent]:
        if self._left is not None:
            self._poll_left(self._left)
        key = ("g", self.epoch)
        news = [
            event
            for event in self.engine.poll({key: self.seen})
            if (event.gang, event.epoch) == key and event.number > self.seen
        ]
        for event in news:
            assert event.number == self.seen + 1, (event, self.seen)
            self.seen = event.number
            self.events.append(event)
            self.heard_s[event.kind] = time.perf_counter()
            self._answer(event)
        return news

    def _poll_left(self, left: _Left) -> None:
        """Reads what the epoch before tells of jobs that leave it; ends it behind the last one."""
        for event in self.engine.poll({("g", left.epoch): left.seen}):
            if event.epoch != left.epoch or event.number <= left.seen:
                continue
            left.seen = event.number
            self.events.append(event)
            assert event.kind != "died", event
            if event.kind == "stepped" and event.job in self.jobs:
                self._hear_of(self.jobs[event.job], event)
            elif event.kind == "stopped":
                self._left = None
            elif event.kind == "left" and event.job is not None:
                left.holds.remove(event.job)
                if self._has_started:
                    self._prepare(event.job)
                if not left.holds:
                    stop = Command(gang="g", epoch=left.epoch, seq=left.posted + 1, kind="stop")
                    self.engine.post(stop)

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        end_s = time.monotonic() + HANG_S
        while not is_reached():
            assert time.monotonic() < end_s, [asdict(event) for event in self.events[-5:]]
            if not self.poll():
                time.sleep(_LOOK_S)

    def run_to_end(self) -> None:
        self.run_until(lambda: all(job.ended is not None for job in self.jobs.values()))

    def stop(self) -> None:
        self.post("stop", body={"save": True})
        self.run_until(lambda: not self.engine.gangs())

    def adapter_digests(self) -> dict[str, str]:
        return {
            job: digest(self.home.job(job) / "adapter" / "adapter_model.safetensors")
            for job in self.jobs
        }

    def _answer(self, event: GangEvent) -> None:
        if event.kind == "started" and event.number > self.answered:
            held = self._left.holds if self._left is not None else set[str]()
            for job, driven in self.jobs.items():
                if driven.ended is None and job not in held:
                    self._prepare(job)
        elif event.kind == "died":
            # A rank that misses the killed one may be the first whose end its engine hears of.
            reason = event.body["reason"]
            assert not self.restarts or "SIGKILL" in reason or "is lost" in reason, event
            self.deaths.append(event)
            if self.restarts:
                self.start()
        if event.job in self.jobs:
            self._hear_of(self.jobs[event.job], event)

    def _hear_of(self, driven: DrivenJob, event: GangEvent) -> None:
        driven.heard_s[event.kind] = time.perf_counter()
        driven.state = (
            event.kind if event.kind in ("prepared", "refused", "joined") else driven.state
        )
        if event.kind == "prepared" and event.number > self.answered:
            self.post("join", event.job)
        elif event.kind == "stepped":
            step, loss = event.body["step"], event.body["loss"]
            before = driven.losses.setdefault(step, loss)
            assert before == loss or not self._exact, (event, before)
        elif event.kind in ("ended", "refused"):
            driven.ended = event.body

    def _prepare(self, job: str) -> None:
        driven = self.jobs[job]
        held = read_lease(self.home.job(job))
        lease = held.lease + 1 if held else 1
        driven.order = JobOrder(**(asdict(driven.order) | {"lease": lease}))
        driven.state = "preparing"
        write_lease(self.home.job(job), Lease(gang="g", epoch=self.epoch, lease=lease))
        self.post("prepare", job, asdict(driven.order))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def quickstart_base() -> dict[str, Any]:
    """The section `base_model` of the quickstart, with an absolute path."""
    base = yaml.safe_load(QUICKSTART.read_text())["base_model"]
    return base | {"path": str(QUICKSTART.parent / base["path"])}


def quickstart_jobs(names: Sequence[str], **more: Any) -> dict[str, dict[str, Any]]:
    """Jobs of the quickstart by name, with absolute paths; `more` replaces fields."""
    jobs = {job["name"]: job for job in yaml.safe_load(QUICKSTART.read_text())["jobs"]}
    for job in jobs.values():
        job["data"] = {key: str(QUICKSTART.parent / path) for key, path in job["data"].items()}
    return {name: jobs[name] | more for name in names}
