"""What probes are told, and what Prometheus is told of jobs."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.helpers.http_service import Api
from tests.helpers.stored_jobs import put_job, serve_gang, start
from tlora_megatron.service.api import probes
from tlora_megatron.service.api.server import make_app
from tlora_megatron.service.home import make_folder
from tlora_megatron.service.settings import declare_bases
from tlora_megatron.service.store import JobState


@pytest.mark.parametrize("word", ["ready", "store", "controller", "bases"])
def test_a_probe_is_told_in_one_word_what_is_missing(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(probes, "PATIENCE_S", 0.2)
    if word != "controller":
        api.store.lock.take()
    if word == "bases":
        (tmp_path / "base").mkdir()
        (tmp_path / "base/config.json").write_text("{}")
        declare_bases(api.home, [f"gone={tmp_path}/base"])
        (tmp_path / "base/config.json").unlink()
    busy: AbstractContextManager[object] = nullcontext()
    if word == "store":
        busy = api.store.database.write()
    client = api.client(None)
    with busy:
        found = client.get("/readyz")
    assert (found.text, found.status_code) == (word, 200 if word == "ready" else 503)
    assert client.get("/healthz").text == "ok"


def test_a_probe_asks_by_the_address_of_a_pod(api: Api) -> None:
    client = TestClient(make_app(api.service, hosts={"tlora.example.org"}))
    assert [client.get(path).status_code for path in ("/healthz", "/docs")] == [200, 403]


def _scraped(api: Api) -> str:
    return api.client("prom", ("scrape",)).get("/metrics").text


def test_figures_of_jobs_are_those_of_store_and_folders(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.store.database, "clock", lambda: 1000.0)
    serve_gang(api.store, api.home)
    ids = {name: put_job(api.store, name, tenant=name) for name in ("ann", "bob", "cyd")}
    for name, tokens in (("ann", 70), ("bob", 7)):
        start(api.store, ids[name])
        api.store.jobs.update(ids[name], tokens=tokens)
    api.store.jobs.change(ids["cyd"], JobState.QUEUED)
    os.utime(make_folder(api.home.job(ids["ann"]) / "checkpoints"), (1060.0, 1060.0))
    monkeypatch.setattr(api.store.database, "clock", lambda: 1100.0)
    assert 'tlora_incidents_total{what="hung"} 0.0' in _scraped(api)
    api.store.events.add("said", body={"what": "hung", "message": "a gang hung"})
    text = _scraped(api)
    for line in (
        'tlora_jobs{state="queued",tenant="cyd"} 1.0',
        'tlora_tokens{tenant="ann"} 70.0',
        'tlora_checkpoint_age_seconds{tenant="ann"} 40.0',
        'tlora_checkpoint_age_seconds{tenant="bob"} 100.0',
        'tlora_queue_oldest_seconds{tenant="cyd"} 100.0',
        'tlora_incidents_total{what="hung"} 1.0',
    ):
        assert line in text, line
    assert 'tlora_incidents_total{what="hung"} 1.0' in _scraped(api), "it is counted once"
