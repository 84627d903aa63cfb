"""Sessions that commit b9fb101e kept as files are taken up by the store with everything in them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import insert, inspect, select
from starlette.testclient import TestClient

from tests.helpers.http_service import bearer
from tests.helpers.older_service import ENDED, SESSION, unpack_b9fb101e
from tests.helpers.postgres import emptied
from tlora_megatron.service.api.server import make_app
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.home import Home
from tlora_megatron.service.session_files import take_up_sessions
from tlora_megatron.service.store import Store, open_store, tables

FIRST, SECOND, DRAFT = (f"{SESSION}:train:{number}" for number in (0, 1, 7))
KEPT, NAMED = f"tinker://{FIRST}/weights/kept", f"tinker://{FIRST}/sampler_weights/named"


class Old(NamedTuple):
    """A folder that b9fb101e wrote, with its store opened by this version."""

    home: Home
    store: Store

    def folder(self, session: str = SESSION) -> Path:
        """The folder of a session."""
        (found,) = self.home.tenants.glob(f"*/tinker/{session}")
        return found

    def rewrite(self, file: str, **changes: Any) -> None:
        """Changes what a file of ann's session says."""
        path = self.folder() / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def rows(self) -> list[Any]:
        """All that the store has of sessions."""
        found: list[Any] = []
        with self.store.database.read() as connection:
            for table in tables.TINKER:
                found += connection.execute(select(table).order_by(*table.primary_key)).all()
        return found


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Old]:
    """The folder with its own database."""
    home = unpack_b9fb101e(tmp_path)
    with open_store(home.store) as store:
        yield Old(home, store)


@pytest.fixture(params=["sqlite", "postgres"])
def old(request: pytest.FixtureRequest, sqlite: Old) -> Iterator[Old]:
    """The folder with its own database, or with one of PostgreSQL that has the same jobs."""
    if request.param == "sqlite":
        yield sqlite
        return
    with open_store(emptied(request.getfixturevalue("server"))) as store:
        with store.database.write() as connection, sqlite.store.database.read() as theirs:
            for table in (tables.job, tables.document):
                rows = [dict(row) for row in theirs.execute(select(table)).mappings()]
                connection.execute(insert(table), rows)
        yield Old(sqlite.home, store)


def test_everything_is_there_for_its_clients(old: Old) -> None:
    beat_at = (old.folder() / "beat").stat().st_mtime
    said = ["took up 2 sessions of Tinker's clients from their files"]
    assert take_up_sessions(old.home, old.store) == said
    assert old.store.sessions.get(SESSION, tenant="ann").heard_at == pytest.approx(beat_at)
    secret = old.store.tokens.make("ann").secret
    client = TestClient(make_app(Service.of(old.home, old.store)), headers=bearer(secret))

    def get(path: str) -> Any:
        found = client.get(f"/api/v1/{path}")
        assert found.status_code == 200, found.text
        return found.json()

    def post(route: str, **body: Any) -> Any:
        return client.post(f"/api/v1/{route}", json=body)

    assert get("sessions")["sessions"] == [SESSION]
    shown = get(f"sessions/{SESSION}")
    assert shown["user_metadata"] == {"who": "ann"}
    assert shown["training_run_ids"] == [SECOND, FIRST]
    assert shown["sampler_ids"] == [f"{SESSION}:sample:{number}" for number in range(3)]
    runs = get("training_runs")["training_runs"]
    assert [(run["lora_rank"], run["user_metadata"]) for run in runs] == [
        (1, None),
        (1, {"run": "first"}),
    ]
    checkpoints = get(f"training_runs/{FIRST}/checkpoints")["checkpoints"]
    assert [one["tinker_path"] for one in checkpoints] == [KEPT, NAMED]
    assert [one["expires_at"] is None for one in checkpoints] == [False, True]
    assert checkpoints[0]["time"].startswith("2026-")
    assert post("weights_info", tinker_path=KEPT).json()["train_mlp"] is False
    samplers = [get(f"samplers/{SESSION}:sample:{number}") for number in range(3)]
    assert [one["model_path"] for one in samplers] == [
        f"tinker://{FIRST}/sampler_weights/session-0", None, NAMED,
    ]  # fmt: skip
    assert post("session_heartbeat", session_id=SESSION).status_code == 200
    sampled = post("retrieve_future", request_id=f"{SESSION}:sample:1:0:sample")
    assert sampled.content == (old.folder() / "samples/1/0.pb").read_bytes()
    for request in (f"{FIRST}:2:optim_step", f"{SECOND}:2:optim_step"):
        assert "grad_norm" in str(post("retrieve_future", request_id=request).json())
    step = post("optim_step", model_id=SECOND, seq_id=3, adam_params={})
    assert step.status_code == 200
    (job,) = [row.id for row in old.store.jobs.page() if row.name == f"{SESSION}-train-1"]
    assert (old.home.job(job) / "requests/00000004.safetensors").is_file(), "behind its load"
    assert post("get_info", model_id=DRAFT).status_code == 404
    again = {"session_id": SESSION, "model_seq_id": 7, "base_model": "base"}
    assert post("create_model", **again).status_code == 200
    assert post("get_info", model_id=DRAFT).status_code == 200
    client.headers = bearer(old.store.tokens.make("bob").secret)
    ended = post("session_heartbeat", session_id=ENDED)
    assert (ended.status_code, "its client has finished" in ended.json()["error"]) == (410, True)
    (left,) = old.store.sessions.models(tenant="bob")
    assert left.last_request == 1


def test_tables_that_were_brought_up_are_those_of_a_new_store(sqlite: Old, tmp_path: Path) -> None:
    with open_store(tmp_path / "new.sqlite") as new:
        shapes = []
        for store in (new, sqlite.store):
            with store.database.read() as connection:
                found = inspect(connection)
                shapes.append(
                    {
                        name: (
                            sorted(map(str, found.get_columns(name)[0])),
                            sorted(
                                (column["name"], str(column["type"]), column["nullable"])
                                for column in found.get_columns(name)
                            ),
                            sorted(str(index["name"]) for index in found.get_indexes(name)),
                        )
                        for name in found.get_table_names()
                    }
                )
    assert shapes[0] == shapes[1]


def test_files_are_moved_aside_and_samples_stay(old: Old) -> None:
    take_up_sessions(old.home, old.store)
    assert {entry.name for entry in old.folder().iterdir()} == {"before_store", "samples"}
    before = old.rows()
    assert take_up_sessions(old.home, old.store) == []
    assert old.rows() == before


@pytest.mark.parametrize("moves", range(0, 10, 3))
def test_a_kill_behind_the_commit_loses_and_doubles_nothing(
    old: Old, moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, rename = moves, os.rename

    def killed(*args: Any) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        rename(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            take_up_sessions(old.home, old.store)
    before = old.rows()
    assert len(before) == 2 + 3 + 3 + 2
    old.store.sessions.end(SESSION, "its client has finished meanwhile")
    take_up_sessions(old.home, old.store)
    assert old.store.sessions.get(SESSION, tenant="ann").ended is not None
    assert len(old.rows()) == len(before)
    assert not list(old.home.tenants.glob("*/tinker/*/session.json"))


def test_a_kill_before_the_commit_leaves_the_files(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(old.store.sessions, "note", killed)
        with pytest.raises(KeyboardInterrupt):
            take_up_sessions(old.home, old.store)
    assert old.rows() == []
    (said,) = take_up_sessions(old.home, old.store)
    assert said.startswith("took up")
    assert len(old.rows()) == 10


def test_a_model_whose_making_was_cut_off_has_the_job_that_was_made_for_it(old: Old) -> None:
    (job,) = [row.id for row in old.store.jobs.page() if row.name == f"{SESSION}-train-1"]
    old.rewrite("models/1.json", job="")
    take_up_sessions(old.home, old.store)
    assert old.store.sessions.model(SECOND, tenant="ann").job == job


def test_a_sampler_that_stays_at_a_version_does_so(old: Old) -> None:
    old.rewrite("samplers/2.json", version="j1jsps@4")
    take_up_sessions(old.home, old.store)
    (pinned,) = old.store.sessions.pinned("ann")
    assert (pinned.id, pinned.version) == (f"{SESSION}:sample:2", "j1jsps@4")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "must hold JSON"),
        ("{}", "KeyError: 'job'"),
        ('{"job": "j9gone"}', "a job's id must be one of the store's, got 'j9gone'"),
    ],
)
def test_a_damaged_session_waits_and_the_others_are_taken_up(
    old: Old, content: str, sentence: str
) -> None:
    file = old.folder() / "models/0.json"
    whole = file.read_text()
    file.write_text(content)
    taken, damaged = take_up_sessions(old.home, old.store)
    assert taken.startswith("took up 1 sessions")
    assert damaged.startswith(f"session {SESSION} must be whole to be taken up from its files, got")
    assert sentence in damaged
    assert [row.id for row in old.store.sessions.all()] == [ENDED]
    file.write_text(whole)
    (said,) = take_up_sessions(old.home, old.store)
    assert said.startswith("took up")
    assert len(old.rows()) == 10
