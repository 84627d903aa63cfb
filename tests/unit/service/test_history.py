"""A job's history: events and steps in one order, from every place on."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import pytest

from tests.helpers.stored_jobs import finish, put_job, serve_gang, start, write_steps
from tlora_megatron.service.history import _BLOCK, History, Mark, Past, Place, Row, rows_at
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import Store, open_store


@pytest.fixture
def store(home: Home) -> Iterator[Store]:
    with open_store(home.store) as opened:
        yield opened


def words(row: dict[str, Any]) -> str:
    return str(row["event"]) if row["kind"] == "event" else f"{row['kind']} {row['step']}"


@pytest.fixture
def job(store: Store, home: Home) -> str:
    """A job with two steps, an evaluation and a saved checkpoint between them."""
    made = put_job(store)
    serve_gang(store, home)
    start(store, made)
    write_steps(home, made, {"step": 0, "eval_loss": 3.0}, {"step": 1, "loss": 2.0})
    for kind in ("saved", "evaluated"):
        store.events.add(kind, job=made, body={"step": 1})
    return made


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
    write_steps(home, job, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5})
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


def backwards(
    store: Store, home: Home, job: str, mark: Mark | None = None
) -> list[tuple[Mark, Row]]:
    with closing(Past(store, home, job)) as past:
        rows = past.before(mark)
        assert rows is not None
        return list(rows)


def test_backwards_it_is_the_same(store: Store, home: Home, job: str) -> None:
    for end in ("running", "over"):
        if end == "over":
            finish(store, job)
        told, _ = History(store, home, job).read()
        rows = backwards(store, home, job)
        without_times = [
            {key: row[key] for key in row if key != "at" or row["kind"] == "event"}
            for _, row in rows
        ]
        assert without_times == [one.row for one in told][::-1]
        assert all(row["at"] > 0 for _, row in rows)
        for count, (mark, _) in enumerate(rows, start=1):
            assert Mark.read(str(mark)) == mark
            assert backwards(store, home, job, mark) == rows[count:]


def test_backwards_from_no_row(store: Store, home: Home, job: str) -> None:
    with closing(Past(store, home, job)) as past:
        for kind, number in (("step", 2), ("step", 0), ("evaluation", 1), ("event", 999)):
            assert past.before(Mark(kind, number)) is None  # type: ignore[arg-type]
    assert [Mark.read(text) for text in ("step-01", "step--1", "x-1", "step-1 ", "")] == [None] * 5


def test_backwards_a_job_without_a_file(store: Store, home: Home) -> None:
    made = put_job(store)
    with closing(Past(store, home, made)) as past:
        assert past.before(Mark("step", 1)) is None
    assert [row["event"] for _, row in backwards(store, home, made)] == ["submitted"]


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of bytes that were read."""
    counts: list[int] = []
    pread = os.pread

    def counting(file: int, size: int, place: int) -> bytes:
        counts.append(size)
        return pread(file, size, place)

    monkeypatch.setattr(os, "pread", counting)
    return counts


def test_of_a_long_file_the_end_alone_is_read(
    store: Store, home: Home, job: str, read_bytes: list[int]
) -> None:
    rows = []
    for step in range(1, 40_001):
        rows.append({"step": step, "loss": random.random()})
        if step % 1000 == 0:
            rows.append({"step": step, "eval_loss": random.random()})
            store.events.add("saved", job=job, body={"step": step}) if step % 8_000 == 0 else None
    write_steps(home, job, *rows, torn='{"step": 40001, "lo')
    path = home.job(job) / "metrics.jsonl"
    expected = [words(one.row) for one in History(store, home, job).read()[0]][::-1]
    assert expected[:2] == ["saved", "evaluation 40000"]
    assert path.stat().st_size > 80 * _BLOCK

    def page(mark: Mark | None, most_blocks: int) -> list[tuple[Mark, Row]]:
        read_bytes.clear()
        with closing(Past(store, home, job)) as past:
            rest = past.before(mark)
            assert rest is not None
            found = list(islice(rest, 20))
        assert sum(read_bytes) < most_blocks * _BLOCK
        return found

    mark, found = None, []
    for _ in range(5):  # pages, one behind the other
        rows_behind = page(mark, 8)
        found += [words(row) for _, row in rows_behind]
        mark = rows_behind[-1][0]
    assert found == expected[:100]

    for mark in (Mark("step", 16_001), Mark("evaluation", 16_000), Mark("step", 1)):
        at = expected.index(f"{mark.kind} {mark.number}")
        assert [words(row) for _, row in page(mark, 12)] == expected[at + 1 : at + 21]

    read_bytes.clear()
    found_at = rows_at(home, job, [40_000, 16_001, 1, 0, 40_001])
    assert [[words(row) for row in rows] for rows in found_at.values()] == [
        ["evaluation 40000", "step 40000"], ["step 16001"], ["step 1"], [], [],
    ]  # fmt: skip
    assert sum(read_bytes) < 5 * 6 * _BLOCK
    assert rows_at(home, "jnobody", [3]) == {3: []}


def test_lines_longer_than_a_block(store: Store, home: Home, job: str) -> None:
    rows = [
        {"step": step, "loss": 1.0, "note": "x" * random.choice([0, 5, _BLOCK, 3 * _BLOCK])}
        for step in range(1, 40)
    ]
    write_steps(home, job, *rows)
    steps = [row["step"] for _, row in backwards(store, home, job) if row["kind"] == "step"]
    assert steps == list(range(39, 0, -1))
    for step in (1, 20, 39):
        rest = backwards(store, home, job, Mark("step", step))
        assert [row["step"] for _, row in rest if row["kind"] == "step"] == steps[39 - step + 1 :]
