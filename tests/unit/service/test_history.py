"""A job's history: events and steps in one order, from every place on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.stored_jobs import finish, serve_gang, start
from tlora_megatron.service.history import History, Place
from tlora_megatron.service.home import Home, make_folder
from tlora_megatron.service.store import NewJob, Store, open_store


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "service")


@pytest.fixture
def store(home: Home) -> Iterator[Store]:
    with open_store(home.store) as opened:
        yield opened


def write_steps(home: Home, job: str, rows: list[dict[str, Any]]) -> None:
    path = make_folder(home.job(job)) / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def words(row: dict[str, Any]) -> str:
    return str(row["event"]) if row["kind"] == "event" else f"{row['kind']} {row['step']}"


@pytest.fixture
def job(store: Store, home: Home) -> str:
    """A job with two steps, an evaluation and a saved checkpoint between them."""
    (made,) = store.jobs.submit([NewJob(name="one", document={}, base="b", key="k")])
    serve_gang(store, home)
    start(store, made.id)
    write_steps(home, made.id, [{"step": 0, "eval_loss": 3.0}, {"step": 1, "loss": 2.0}])
    store.events.add("saved", job=made.id, body={"step": 1})
    store.events.add("evaluated", job=made.id, body={"step": 1})
    return made.id


def test_events_come_behind_their_steps(store: Store, home: Home, job: str) -> None:
    told, is_over = History(store, home, job).read()
    rows = [words(one.row) for one in told]
    assert rows[-3:] == ["evaluation 0", "step 1", "saved"]
    assert "evaluated" not in rows, "it is a line of the metrics"
    assert not is_over


def test_a_reader_goes_on_behind_every_row(store: Store, home: Home, job: str) -> None:
    finish(store, job)
    told, is_over = History(store, home, job).read()
    assert is_over
    for count, one in enumerate(told, start=1):
        rest, _ = History(store, home, job, Place.read(str(one.place))).read()
        assert rest == told[count:]


def test_steps_that_are_taken_again_are_told_once(store: Store, home: Home, job: str) -> None:
    history = History(store, home, job)
    history.read()
    write_steps(home, job, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}])
    assert [words(one.row) for one in history.read()[0]] == ["step 2"]


def test_it_is_followed_to_its_end(
    store: Store, home: Home, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: finish(store, job))
    found = [words(one.row) for one in History(store, home, job).follow()]
    assert found[-3:] == ["saved", "released", "state"]


@pytest.mark.parametrize("text", ["", "1", "1.2", "1.2.x", "a.b.c", "1.2.3.4"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a place in a history must be like 12\.3\.0, got"):
        Place.read(text)
