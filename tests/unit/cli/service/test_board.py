"""The board of `tlora serve` shows its store."""

from __future__ import annotations

import io
import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from rich.console import Console

from tests.helpers.commands import Tlora
from tests.helpers.launch import HANG_S
from tests.helpers.stored_jobs import finish, serve_gang, start
from tlora_megatron.cli.service.board import Board, Speeds, layout_words
from tlora_megatron.cli.service.jobs import duration_words
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import Progress, Store, StoreError


def board_on(store: Store) -> tuple[Board, io.StringIO]:
    out = io.StringIO()
    return Board(store, Console(file=out, width=120, height=40), "local engine"), out


def test_gangs_and_jobs_with_their_speeds(
    store: Store, home: Home, run_file: Path, tlora: Tlora
) -> None:
    one, _ = tlora.json("submit", run_file)
    serve_gang(store, home)
    start(store, one["id"])
    board, out = board_on(store)
    console = Console(file=out, width=120)
    console.print(board.table())
    text = out.getvalue()
    assert "local engine, 0 s" in text
    assert "g1 #1   running   base   1 process   0:0       1          0" in text
    assert "3/5    0.5" in text
    assert "1 validating, 1 running; Ctrl-C stops" in text


def test_without_a_terminal_it_prints_each_change_once(
    store: Store, home: Home, run_file: Path, tlora: Tlora
) -> None:
    board, out = board_on(store)
    one, _ = tlora.json("submit", run_file)
    seq = board.say_changes(0)
    serve_gang(store, home)
    start(store, one["id"])
    finish(store, one["id"])
    assert board.say_changes(board.say_changes(seq)) == store.events.last()
    words = [line[10:] for line in out.getvalue().splitlines()]
    name = f"one ({one['id']})"
    assert words[0] == f"{name} submitted"
    assert words[2:] == [
        f"{name} validating -> queued",
        f"{name} queued -> starting",
        f"{name} starting -> running",
        f"{name} running -> finished",
    ]


def test_it_goes_on_when_the_store_answers_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, _ = board_on(store)
    monkeypatch.setattr("tlora_megatron.cli.service.board._LOOK_EVERY_S", 0.01)
    failures, answers = iter([StoreError("the disk must have room")]), Event()

    def say_changes(seq: int) -> int:
        for failure in failures:
            raise failure
        answers.set()
        return seq

    monkeypatch.setattr(board, "say_changes", say_changes)
    with board:
        assert answers.wait(HANG_S)


def test_speeds_are_those_of_the_last_seconds(
    store: Store, home: Home, run_file: Path, tlora: Tlora
) -> None:
    one, two = (job["id"] for job in tlora.json("submit", run_file))
    serve_gang(store, home)
    start(store, one)
    speeds = Speeds()
    for now_s, tokens in ((0, 0), (5, 500), (10, 2000), (20, 12000), (21, 3000), (22, 3100)):
        store.jobs.progress([Progress(job=one, step=4, tokens=tokens)])
        speeds.update(store.load().jobs, now_s)
        if now_s == 20:
            assert speeds.of(one) == 1000.0
    assert speeds.of(one) == 100.0  # since it went on from a checkpoint
    assert speeds.of(two) == 0.0


@pytest.mark.parametrize(
    ("parallel", "world_size", "words"),
    [
        ({}, 1, "1 process"),
        ({}, 2, "DP2"),
        ({"tp_size": 2}, 4, "TP2 DP2"),
        ({"tp_size": 2, "pp_size": 2, "cp_size": 1}, 4, "TP2 PP2"),
    ],
)
def test_layouts(parallel: dict[str, Any], world_size: int, words: str) -> None:
    assert layout_words(parallel, world_size) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (59.9, "59 s"), (185, "3 min 5 s"), (3600, "1 h"), (190_000, "2 d 4 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration_words(seconds) == words


def test_inspect_shows_a_job_of_a_service(tmp_path: Path, tlora: Tlora) -> None:
    folder = tmp_path / "j1abcd"
    folder.mkdir()
    summary = {"status": "finished", "steps": 5, "max_steps": 5, "rank": 4, "tokens": 10}
    (folder / "summary.json").write_text(json.dumps(summary))
    words = tlora("inspect", folder).split()
    assert words[-7:-3] == ["j1abcd", "finished", "4", "5/5"]
