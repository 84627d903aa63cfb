"""What Prometheus is told: the service's figures from its store, and this process's requests."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlora_megatron.service.api.service import Service
from tlora_megatron.service.store import JobState

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
LISTENERS = Gauge("tlora_stream_listeners", "Open streams of the page.", registry=_HTTP)
_CHECKPOINTS = "checkpoints"
_MOST_RUNNING = 5000
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


INCIDENTS = ("rank_died", "out_of_memory", "hung", "quarantined", "not_saved", "node_down", "slow")
"""What a controller says that is counted; Prometheus must know a counter before it rises."""


class Figures(Collector):
    """Collects what the store shows at one moment."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._guard = threading.Lock()
        self._incidents = Counter(dict.fromkeys(INCIDENTS, 0))
        self._last_event: int | None = None

    def text(self) -> bytes:
        """All figures; scrapes take turns."""
        with self._guard:
            return bytes(generate_latest(self) + generate_latest(_HTTP))

    def collect(self) -> Iterator[Metric]:
        store = self._service.store
        words = "1 while a controller gives signs of life."
        yield _gauges("served", words, (), {(): self._service.is_served})
        yield from self._jobs()
        words = "What a controller has said of trouble since this process of HTTP was first asked."
        counts = {(what,): count for what, count in self._new_incidents().items()}
        yield _gauges("incidents", words, ("what",), counts, CounterMetricFamily)
        disk = shutil.disk_usage(self._service.home.root)
        words = "Bytes of the disk that holds the service's folder."
        yield _gauges("disk_bytes", words, ("state",), {("all",): disk.total, ("free",): disk.free})
        boards = {name: board.body for name, board in store.boards.read().items()}
        board, figures = boards.get("cluster", {}), boards.get("figures", {})
        living = store.gangs.live()
        gpus = {
            ("all",): sum(node["gpus"] for node in board.get("nodes", ())),
            ("held",): sum(len(gang.spec.gpus) for gang in living),
            ("used",): figures.get("gpus_used", 0) if living else 0,
            ("set_aside",): len(board.get("set_aside", ())),
        }
        words = "GPUs that there are, that gangs hold, that train."
        yield _gauges("gpus", words, ("state",), gpus)
        yield from _groups(boards.get("groups", {}).get("groups", ()))
        for name, words in _TIMES.items():
            tally = figures.get(name, {})
            count, total = tally.get("count", 0), tally.get("sum_s", 0.0)
            found = f"tlora_{name}_seconds"
            yield SummaryMetricFamily(found, words, count_value=count, sum_value=total)

    def _jobs(self) -> Iterator[Metric]:
        """How many jobs there are, what they have trained, how long they wait and are not saved."""
        store, now_s = self._service.store, self._service.store.database.clock()
        tallies = store.jobs.tallies()
        numbers = {of: tally.jobs for of, tally in tallies.items()}
        yield _gauges("jobs", "Jobs.", ("tenant", "state"), numbers)
        tokens: Counter[tuple[str]] = Counter()
        for (tenant, _), tally in tallies.items():
            tokens[tenant,] += tally.tokens
        words = "Tokens that a tenant's jobs have trained; less when steps are taken again."
        yield _gauges("tokens", words, ("tenant",), tokens)
        waits = {
            (tenant,): now_s - tally.oldest_at
            for (tenant, state), tally in tallies.items()
            if state is JobState.QUEUED
        }
        words = "Age of the oldest job in the queue."
        yield _gauges("queue_oldest_seconds", words, ("tenant",), waits)
        ages: dict[tuple[str], float] = {}
        for job in store.jobs.page(states=[JobState.RUNNING], limit=_MOST_RUNNING):
            if job.num_steps is None:  # a client drives it: between steps there is nothing to save
                continue
            saved_at = _changed_at(self._service.home.job(job.id) / _CHECKPOINTS)
            age_s = max(0.0, now_s - max(saved_at, job.started_at or now_s))
            ages[job.tenant,] = max(age_s, ages.get((job.tenant,), 0.0))
        words = "Age of the oldest last checkpoint of a running job."
        yield _gauges("checkpoint_age_seconds", words, ("tenant",), ages)

    def _new_incidents(self) -> Mapping[str, int]:
        """Counts what was said since the last scrape."""
        events = self._service.store.events
        if self._last_event is None:
            self._last_event = events.last()
        for event in events.after(self._last_event, kinds=["said"], limit=None):
            self._last_event = event.seq
            if event.body["what"] in self._incidents:
                self._incidents[event.body["what"]] += 1
        return self._incidents


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


def _changed_at(folder: Path) -> float:
    """When a folder got or lost a file; 0 if it is not there."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _gauges(
    name: str,
    words: str,
    labels: tuple[str, ...],
    values: Mapping[Any, float],
    family: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    found = family(f"tlora_{name}", words, labels=labels)
    for of, value in values.items():
        found.add_metric(of, value)
    return found
