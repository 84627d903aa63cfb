"""The views of tenants and admins: machines, groups, jobs, the past and decisions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.helpers.http_service import Api, bearer, listening
from tests.helpers.launch import HANG_S, REPO
from tests.helpers.live_service import folder_in_memory
from tests.helpers.shown_service import ShownService, loss_at, shown_service
from tests.helpers.stored_jobs import put_job
from tlora_megatron.service.api.page import router, views
from tlora_megatron.service.api.page.facts import Viewer, read_facts
from tlora_megatron.service.store import JobState

ADMIN = ("submit", "read", "admin")
VIEWS = ("cluster", "groups", "timeline", "decisions")


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[ShownService, Api]]:
    """A busy service."""
    with (
        pytest.MonkeyPatch.context() as patch,
        folder_in_memory() as folder,
        shown_service(folder / "service", num_jobs=9) as found,
    ):
        patch.setattr(router, "_LOOK_S", 0.02)
        patch.setattr(router, "_REFRESH_S", 0.05)
        yield found


@pytest.fixture
def shown(both: tuple[ShownService, Api]) -> ShownService:
    return both[0]


@pytest.fixture
def busy(both: tuple[ShownService, Api]) -> Api:
    return both[1]


def ask(api: Api, path: str, tenant: str = "ann", scopes: tuple[str, ...] = ("read",)) -> Any:
    answer = api.client(tenant, scopes).get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


@contextmanager
def stream(address: str, secret: str) -> Iterator[httpx.Response]:
    """The page's events as they come."""
    path = f"{address}/v1/stream"
    with httpx.stream("GET", path, headers=bearer(secret), timeout=HANG_S) as answer:
        yield answer


def test_machines_and_who_holds_them(busy: Api) -> None:
    found = ask(busy, "/v1/cluster", scopes=ADMIN)
    assert found["served"]
    assert found["gpus"]["all"] == 4
    assert found["gpus"]["held"] >= found["gpus"]["used"] >= 1
    assert [node["healthy"] for node in found["nodes"]] == [True, True]
    assert found["nodes"][1]["gpus"][1]["set_aside_until"] is not None
    assert found["nodes"][0]["gpus"][0]["gang"] == "g1"
    assert "host" in found["nodes"][0]
    assert "host" not in ask(busy, "/v1/cluster")["nodes"][0]


def test_an_admin_sees_who_trains_beside_whom(busy: Api, shown: ShownService) -> None:
    found = ask(busy, "/v1/groups", scopes=ADMIN)["groups"]
    (group,) = (g for g in found if any(m["name"] == "support-tone" for m in g["members"]))
    assert group["base"] == "base"
    assert group["measured_tokens_per_s"] > 0
    for member in group["members"]:
        assert member["own"]
        assert member["tenant"] in ("ann", "bob", "cyd")
        assert member["slowdown"] <= member["bound"]
        assert member["loss"] < 4


def test_a_tenant_knows_others_only_as_strangers(busy: Api, shown: ShownService) -> None:
    told = {path: json.dumps(ask(busy, f"/v1/{path}")) for path in VIEWS}
    others = ("sql-dialect", "math-steps", "radiology", "tickets-v2", "router-small", "bob", "cyd")
    for path, text in told.items():
        for word in (*others, *(shown.ids[name] for name in others[:4])):
            assert f'"{word}"' not in text, (path, word)
    groups = ask(busy, "/v1/groups")["groups"]
    members = [member for group in groups for member in group["members"]]
    strangers = [member for member in members if not member["own"]]
    assert {"support-tone", "contracts-de"} <= {m["name"] for m in members if m["own"]}
    assert strangers
    assert all(set(member) == {"id", "own", "phase"} for member in strangers)
    assert all(member["id"].startswith("~") for member in strangers)
    assert all("base" not in group for group in ask(busy, "/v1/groups", "dan")["groups"])


def test_another_tenant_has_other_names_for_the_same_strangers(busy: Api) -> None:
    def strangers(tenant: str) -> set[str]:
        groups = ask(busy, "/v1/groups", tenant)["groups"]
        return {m["id"] for group in groups for m in group["members"] if not m["own"]}

    assert strangers("bob").isdisjoint(strangers("cyd"))


def test_an_admin_may_look_as_a_tenant(busy: Api) -> None:
    mine = ask(busy, "/v1/groups?mine=true", scopes=ADMIN)
    assert mine["groups"] == ask(busy, "/v1/groups")["groups"]


def test_decisions_by_pages(busy: Api) -> None:
    whole = ask(busy, "/v1/decisions", scopes=ADMIN)
    assert whole["next"] is None
    first = ask(busy, "/v1/decisions?limit=3", scopes=ADMIN)
    rest = ask(busy, f"/v1/decisions?before={first['next']}", scopes=ADMIN)
    assert first["decisions"] + rest["decisions"] == whole["decisions"]
    oldest = whole["decisions"][-1]["actions"][0]
    assert (oldest["kind"], oldest["gang"]) == ("start", "g1")
    assert oldest["why"].startswith("1 job starts on 1 GPU: alone")
    assert [job["name"] for job in oldest["jobs"]] == ["support-tone"]
    own = ask(busy, "/v1/decisions")["decisions"]
    assert 0 < len(own) < len(whole["decisions"])
    assert all(any(j["own"] for j in a["jobs"]) for d in own for a in d["actions"])
    answer = busy.client().get("/v1/decisions?limit=0")
    assert answer.status_code == 400


def test_a_curve_is_thinned_and_its_owners(busy: Api, shown: ShownService) -> None:
    job = shown.ids["support-tone"]
    found = ask(busy, f"/v1/curves/{job}?points=50")
    points, evaluations = found["points"], found["evaluations"]
    assert evaluations[0] == [50, pytest.approx(loss_at(1, 50) + 0.1)]
    assert 25 <= len(points) <= 50
    assert points[0][1] > points[-1][1]
    assert points[-1][0] == max(step for step, _ in points)
    assert ask(busy, f"/v1/curves/{job}", scopes=ADMIN)["job"] == job
    for name in (shown.ids["sql-dialect"], "nothing", "..%2F..%2Fstore.sqlite"):
        answer = busy.client().get(f"/v1/curves/{name}")
        assert answer.status_code == 404


def test_the_stream_tells_everything_and_then_what_changes(busy: Api, shown: ShownService) -> None:
    names = []
    with listening(busy.app) as address, stream(address, busy.token("bob")) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            if line.startswith("data: ") and names[-1] == "jobs":
                if "late" in line:
                    break
                if names.count("jobs") == 1:
                    shown.live.submit("late", tenant="bob", steps=5)
    parts = {"cluster", "groups", "jobs", "sweeps", "timeline", "figures", "decisions"}
    assert set(names[:7]) == parts


def test_a_stream_ends_when_its_token_is_revoked(busy: Api) -> None:
    made = busy.store.tokens.make("dan", ("read",))
    with listening(busy.app) as address, stream(address, made.secret) as answer:
        lines = answer.iter_lines()
        next(lines)
        busy.store.tokens.revoke(made.token.id)
        assert "event: revoked" in list(lines)


def test_a_tenant_may_not_open_streams_without_end(
    busy: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "MOST_STREAMS", 1)
    with listening(busy.app) as address, stream(address, busy.token("eve")) as first:
        lines = first.iter_lines()
        next(lines)
        with stream(address, busy.token("eve")) as second:
            assert second.status_code == 429
        with stream(address, busy.token("bob")) as other:
            assert other.status_code == 200
            assert "server" not in other.headers


def test_prometheus_is_told_all_figures(busy: Api) -> None:
    client = busy.client("prom", ("scrape",))
    ask(busy, "/v1/cluster")
    busy.client().get("/v1/curves/nobody")
    busy.client().get("/nothing/here")
    answer = client.get("/metrics")
    assert answer.status_code == 200
    for line in (
        "tlora_served 1.0",
        'tlora_gpus{state="all"} 4.0',
        'tlora_gpus{state="set_aside"} 1.0',
        'tlora_groups{state="running"}',
        'tlora_jobs{state="running",tenant="ann"}',
        'tlora_group_tokens_per_second{gang="g1",kind="measured"}',
        'tlora_group_predicted_over_measured{gang="g1"}',
        "tlora_decide_seconds_count",
        "tlora_join_seconds_sum",
        'tlora_checkpoint_age_seconds{tenant="ann"}',
        'tlora_disk_bytes{state="free"}',
        'tlora_http_request_seconds_bucket{le="0.1",method="GET",route="/v1/cluster",status="2xx"}',
        'tlora_http_request_seconds_count{method="GET",route="/v1/curves/{job}",status="4xx"}',
        'tlora_http_request_seconds_count{method="GET",route="none",status="4xx"}',
    ):
        assert line in answer.text, line
    refused = busy.client("ann").get("/metrics")
    assert refused.status_code == 403
    assert "must have the scope scrape" in refused.json()["error"]["message"]
    assert client.get("/v1/cluster").status_code == 403, "a scraper sees no jobs"


def test_the_dashboard_asks_for_all_figures_and_no_others(busy: Api) -> None:
    ask(busy, "/v1/cluster")
    text = busy.client("prom", ("scrape",)).get("/metrics").text
    labels: dict[str, set[str]] = {}
    for name, given in re.findall(r"^(tlora_\w+)(?:{(.*)})? ", text, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r"(\w+)=", given))
    shown = json.loads((REPO / "deploy/grafana.json").read_text())
    asked = {one["expr"] for panel in shown["panels"] for one in panel["targets"]}
    alerts = (REPO / "docs/operations.md").read_text()
    for expression in asked | set(re.findall(r"`(\S*tlora_[^`]+)`", alerts)):
        names = re.findall(r"tlora_\w+", expression)
        assert set(names) <= set(labels), expression
        used = set(re.findall(r"(\w+)[=!]", expression))
        for words in re.findall(r"(?:by|ignoring) \((.*?)\)", expression):
            used |= set(words.split(", "))
        assert used <= set().union(*(labels[name] for name in names)), expression
    families = set(re.findall(r"^# TYPE (tlora_\w+) ", text, re.MULTILINE))
    families -= {"tlora_http_request_seconds_created"}
    assert [name for name in families if not any(name in one for one in asked)] == []


def test_a_service_that_nobody_serves(api: Api) -> None:
    found = ask(api, "/v1/cluster")
    assert (found["served"], found["nodes"]) == (False, [])
    assert ask(api, "/v1/groups")["groups"] == []
    assert ask(api, "/v1/decisions") == {"decisions": [], "next": None}
    scraped = api.client("prom", ("scrape",)).get("/metrics").text
    assert "tlora_served 0.0" in scraped


def test_a_tenant_reads_no_path_of_the_host_in_errors(api: Api) -> None:
    job = put_job(api.store, base="quickstart-12345678")
    error = f"{api.home.tenant('ann')}/files/file-1: line 3 must be JSON"
    api.store.jobs.change(job, JobState.FAILED, error=error)
    facts = read_facts(api.service, frozenset({"ann", None}))
    own = views.jobs(facts, Viewer(tenant="ann"))["ended"][0]
    assert (own["error"], own["base"]) == ("file-1: line 3 must be JSON", "quickstart")
    assert views.jobs(facts, Viewer(tenant="bob", sees_all=True))["ended"][0]["error"] == error


def test_the_page_loads_nothing_and_may_do_little(api: Api) -> None:
    answer = api.client(None).get("/")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    for word in ("src=", "http://", "https://www", "@import", "innerHTML", 'style="'):
        assert word not in answer.text.replace("http://www.w3.org/2000/svg", ""), word
