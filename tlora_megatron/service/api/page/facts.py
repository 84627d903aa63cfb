"""What the page and Prometheus are shown of a service and its jobs, as who looks may see it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric, SummaryMetricFamily
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlora_megatron.service.api.service import Service
from tlora_megatron.service.history import last_rows
from tlora_megatron.service.store import LIVE, OVER, Board, Gang, Job, JobState, Stay

WAITING = (JobState.VALIDATING, JobState.QUEUED, JobState.PAUSED)
SHOWN_JOBS = 200
"""Waiting jobs that are listed; of more than these only the number is told."""
SHOWN_ENDED = 20
_MOST_LIVE = 5000
WINDOW_S = 1800.0
"""How far the time line goes back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The state of a whole service at one moment."""

    at: float
    """Unix time."""
    is_served: bool
    """A controller gives signs of life."""
    boards: Mapping[str, Board]
    gangs: tuple[Gang, ...]
    """Those of the time line's window, the living ones among them, in the order of their starts."""
    stays: tuple[Stay, ...]
    jobs: Mapping[str, Job]
    """Jobs that gangs hold or held in the window, by id."""
    waiting: Mapping[str | None, tuple[Job, ...]] = field(default_factory=dict)
    """First jobs of each tenant that wait; under None those of all."""
    ended: Mapping[str | None, tuple[Job, ...]] = field(default_factory=dict)
    """Last jobs of each tenant that are over; under None those of all."""
    counts: Mapping[str | None, Mapping[JobState, int]] = field(default_factory=dict)
    """Jobs by state, of each tenant; under None all."""
    base_names: Mapping[str, str] = field(default_factory=dict)
    """Names of bases, by the keys that jobs have for them."""

    def board(self, name: str) -> Mapping[str, Any]:
        """The values that the controller shows under a name; empty if it has not yet."""
        found = self.boards.get(name)
        return {} if found is None else found.body

    def base_name(self, key: str) -> str:
        """The name of a base, or the last part of its path."""
        return self.base_names.get(key) or key.rpartition("-")[0] or key

    @property
    def living(self) -> tuple[Gang, ...]:
        """Gangs without proof that they are gone."""
        return tuple(gang for gang in self.gangs if gang.ended_at is None)


def read_facts(service: Service, tenants: frozenset[str | None]) -> Facts:
    """Reads the state of a service, and own jobs of some tenants; None: of all tenants."""
    store, now_s = service.store, time.time()
    live = store.jobs.page(states=LIVE, limit=_MOST_LIVE)
    stays = store.leases.stays_since(now_s - WINDOW_S)
    missing = {stay.job for stay in stays} - {job.id for job in live}

    def own(tenant: str | None, **which: Any) -> tuple[Job, ...]:
        """Jobs as a tenant may read of them: errors without paths of the service's host."""
        jobs = store.jobs.page(tenant=tenant, **which)
        if tenant is None:
            return tuple(jobs)
        return tuple(
            job if job.error is None else replace(job, error=service.outward(job.error, tenant))
            for job in jobs
        )

    return Facts(
        at=now_s,
        is_served=service.is_served,
        boards=store.boards.read(),
        gangs=tuple(store.gangs.since(now_s - WINDOW_S)),
        stays=tuple(stays),
        jobs={job.id: job for job in [*live, *store.jobs.many(sorted(missing))]},
        waiting={of: own(of, states=WAITING, limit=SHOWN_JOBS) for of in tenants},
        ended={of: own(of, states=OVER, limit=SHOWN_ENDED, newest_first=True) for of in tenants},
        counts={tenant: store.jobs.counts(tenant=tenant) for tenant in {*tenants, None}},
        base_names=service.base_names(),
    )


_KEY = secrets.token_bytes(32)
"""Others' jobs get their names for strangers with it; a new process gives new ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Viewer:
    """A tenant, or an admin, who sees all tenants' jobs."""

    tenant: str
    sees_all: bool = False

    @property
    def scope(self) -> str | None:
        """The tenant to whose jobs lists are restricted; None for all."""
        return None if self.sees_all else self.tenant

    def may_see(self, job: Job | None) -> bool:
        return job is not None and (self.sees_all or job.tenant == self.tenant)

    def stranger(self, job: str) -> str:
        """A name for a job of somebody else, the same as long as this process lives."""
        text = f"{self.tenant}\0{job}".encode()
        return "~" + hmac.new(_KEY, text, hashlib.sha256).hexdigest()[:8]

    def name(self, job: str, row: Job | None) -> dict[str, Any]:
        if row is None or not self.may_see(row):
            return {"id": self.stranger(job), "own": False}
        named: dict[str, Any] = {"id": row.id, "own": True, "name": row.name}
        return {**named, "tenant": row.tenant} if self.sees_all else named


_MOST_BYTES = 4_000_000
"""Read of a long job's metrics: its last steps."""


class Point(NamedTuple):
    """One step of a curve."""

    step: int
    loss: float


def read_curves(path: Path, points: int) -> dict[str, list[Point]]:
    """Losses of steps and of evaluations, each [] before the first one."""
    rows = last_rows(path, most_bytes=_MOST_BYTES)
    names = {"points": "loss", "evaluations": "eval_loss"}
    return {name: _thinned(rows, loss, points) for name, loss in names.items()}


def _thinned(rows: Sequence[Mapping[str, Any]], name: str, points: int) -> list[Point]:
    """A loss over steps, thinned by means over equal runs of steps."""
    steps = [Point(row["step"], row[name]) for row in rows if row.get(name) is not None]
    if len(steps) <= points:
        return steps
    size = -(-len(steps) // points)
    runs = [steps[begin : begin + size] for begin in range(0, len(steps), size)]
    return [Point(run[-1].step, sum(p.loss for p in run) / len(run)) for run in runs]


_HTTP = CollectorRegistry()
_LATENCY = Histogram(
    "tlora_http_request_seconds",
    "Time until an answer begins.",
    ("method", "route", "status"),
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 30),
    registry=_HTTP,
)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Clients may make up others, each of which would be kept for ever."""
_TIMES = {
    "decide": "Time that the policy took to decide.",
    "join": "Time that the neighbours of a newcomer stood still.",
    "start": "Time from a gang's start until its base was loaded.",
}


class Latencies:
    """Notes how long each request waited for the beginning of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_s = time.perf_counter()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in _METHODS else "other"
                labels = (method, _route(scope), f"{message['status'] // 100}xx")
                _LATENCY.labels(*labels).observe(time.perf_counter() - begin_s)
            await send(message)

        await self._app(scope, receive, noting)


def _route(scope: Scope) -> str:
    """The template of a request's path: paths hold ids, of which there is no end."""
    if scope.get("route") is None:
        return "none"
    path = str(scope["path"])
    for name, value in scope.get("path_params", {}).items():
        before, found, after = path.rpartition(f"/{value}")
        path = f"{before}/{{{name}}}{after}" if found else path
    return path


def exposition(service: Service, num_listeners: int) -> bytes:
    """All figures of a service and of this process's requests."""
    registry = CollectorRegistry()
    registry.register(_Figures(service, num_listeners))
    return bytes(generate_latest(registry) + generate_latest(_HTTP))


class _Figures:
    """Collects what the store shows at one moment."""

    def __init__(self, service: Service, num_listeners: int) -> None:
        self._facts = read_facts(service, frozenset())
        self._jobs = service.store.jobs.unfinished()
        self._num_listeners = num_listeners

    def collect(self) -> Iterator[Metric]:
        words = "1 while a controller gives signs of life."
        yield _gauges("served", words, (), {(): self._facts.is_served})
        words = "Open streams of the page."
        yield _gauges("stream_listeners", words, (), {(): self._num_listeners})
        words = "Jobs that are not over."
        yield _gauges("jobs", words, ("tenant", "state"), dict(sorted(self._jobs.items())))
        board, living = self._facts.board("cluster"), self._facts.living
        used = self._facts.board("figures").get("gpus_used", 0) if living else 0
        gpus = {
            ("all",): sum(node["gpus"] for node in board.get("nodes", ())),
            ("held",): sum(len(gang.spec.gpus) for gang in living),
            ("used",): used,
            ("set_aside",): len(board.get("set_aside", ())),
        }
        words = "GPUs that there are, that gangs hold, that train."
        yield _gauges("gpus", words, ("state",), gpus)
        yield from _groups(self._facts.board("groups").get("groups", ()))
        figures = self._facts.board("figures")
        for name, words in _TIMES.items():
            tally = figures.get(name, {})
            count, total = tally.get("count", 0), tally.get("sum_s", 0.0)
            found = f"tlora_{name}_seconds"
            yield SummaryMetricFamily(found, words, count_value=count, sum_value=total)


def _groups(groups: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    states = Counter((group["state"],) for group in groups)
    yield _gauges("groups", "Gangs that live.", ("state",), dict(sorted(states.items())))
    members = {(group["gang"],): len(group["members"]) for group in groups}
    yield _gauges("group_members", "Jobs of each gang.", ("gang",), members)
    speeds = {
        (group["gang"], kind): group[f"{kind}_tokens_per_s"]
        for group in groups
        for kind in ("measured", "predicted")
        if group[f"{kind}_tokens_per_s"] is not None
    }
    yield _gauges("group_tokens_per_second", "Speed of each gang.", ("gang", "kind"), speeds)
    ratios = {
        (gang,): speeds[gang, "predicted"] / speed
        for (gang, kind), speed in speeds.items()
        if kind == "measured" and speed and speeds.get((gang, "predicted"))
    }
    words = "Predicted over measured speed."
    yield _gauges("group_predicted_over_measured", words, ("gang",), ratios)


def _gauges(name: str, words: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    found = GaugeMetricFamily(f"tlora_{name}", words, labels=labels)
    for of, value in values.items():
        found.add_metric(of, value)
    return found
