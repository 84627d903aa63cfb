"""Figures of a service in Prometheus' format, read from the store when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric, SummaryMetricFamily
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlora_megatron.service.api.page.facts import Facts, read_facts
from tlora_megatron.service.api.service import Service

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
        """Passes a request on."""
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
        """The metrics, as prometheus_client asks for them."""
        yield _gauge("served", "1 while a controller gives signs of life.", self._facts.is_served)
        yield _gauge("stream_listeners", "Open streams of the page.", self._num_listeners)
        yield self._by_tenant()
        yield self._gpus()
        yield from _groups(self._facts.board("groups").get("groups", ()))
        figures = self._facts.board("figures")
        for name, words in _TIMES.items():
            yield _summary(f"{name}_seconds", words, figures.get(name, {}))

    def _by_tenant(self) -> Metric:
        found = GaugeMetricFamily(
            "tlora_jobs", "Jobs that are not over.", labels=("tenant", "state")
        )
        for (tenant, state), number in sorted(self._jobs.items()):
            found.add_metric((tenant, str(state)), number)
        return found

    def _gpus(self) -> Metric:
        found = GaugeMetricFamily(
            "tlora_gpus", "GPUs that there are, that gangs hold, that train.", labels=("state",)
        )
        for state, number in _gpu_counts(self._facts).items():
            found.add_metric((state,), number)
        return found


def _gpu_counts(facts: Facts) -> dict[str, int]:
    board = facts.board("cluster")
    return {
        "all": sum(node["gpus"] for node in board.get("nodes", ())),
        "held": sum(len(gang.spec.gpus) for gang in facts.living),
        "used": facts.board("figures").get("gpus_used", 0) if facts.living else 0,
        "set_aside": len(board.get("set_aside", ())),
    }


def _groups(groups: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    number = GaugeMetricFamily("tlora_groups", "Gangs that live.", labels=("state",))
    members = GaugeMetricFamily("tlora_group_members", "Jobs of each gang.", labels=("gang",))
    speed = GaugeMetricFamily(
        "tlora_group_tokens_per_second", "Speed of each gang.", labels=("gang", "kind")
    )
    ratio = GaugeMetricFamily(
        "tlora_group_predicted_over_measured", "Predicted over measured speed.", labels=("gang",)
    )
    states: dict[str, int] = {}
    for group in groups:
        name, states[group["state"]] = group["gang"], states.get(group["state"], 0) + 1
        members.add_metric((name,), len(group["members"]))
        found = {kind: group[f"{kind}_tokens_per_s"] for kind in ("measured", "predicted")}
        for kind, value in found.items():
            if value is not None:
                speed.add_metric((name, kind), value)
        if found["measured"] and found["predicted"]:
            ratio.add_metric((name,), found["predicted"] / found["measured"])
    for state, count in sorted(states.items()):
        number.add_metric((state,), count)
    return iter((number, members, speed, ratio))


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tlora_{name}", words, value=float(value))


def _summary(name: str, words: str, tally: Mapping[str, Any]) -> Metric:
    count, total = tally.get("count", 0), tally.get("sum_s", 0.0)
    return SummaryMetricFamily(f"tlora_{name}", words, count_value=count, sum_value=total)
