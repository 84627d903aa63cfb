"""`tlora serve` and `tlora token`: mistakes are refused before anything is made; the board."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from rich.console import Console

from tests.helpers.commands import Tlora
from tests.helpers.launch import HANG_S
from tests.helpers.stored_jobs import finish, put_job, serve_gang, start
from tlora_megatron.cli.main import build_parser
from tlora_megatron.cli.service.board import Board, Speeds, layout_words
from tlora_megatron.cli.service.job_table import duration_words
from tlora_megatron.cli.service.serve import open_http
from tlora_megatron.cli.tables import JsonConsole
from tlora_megatron.service import front
from tlora_megatron.service.front import Place, listen
from tlora_megatron.service.home import Home
from tlora_megatron.service.logs import LOG_NAME, formatter, kept_log
from tlora_megatron.service.store import Progress, Store, StoreError


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--http", "99999"], "--http must be PORT or HOST:PORT, with a port of at most 65535"),
        (["--base", "llama"], "--base must be NAME=DIR or NAME=FILE.yaml"),
        (["--hardware", "abacus"], "abacus"),
        (["--checkpoint-every", "0"], "--checkpoint-every must be above 0 seconds, got 0"),
        (["--http", "0", "--keep-sessions", "0.5"], "--keep-sessions must be at least 1 day, got"),
        (["--http", "0", "--keep-sessions", "nan"], "--keep-sessions must be at least 1 day, got"),
        (["--sampler", "vllm"], "--sampler must be left out without --http, got 'vllm'"),
        (["--sampler-gpu", "1"], "--sampler-gpu must be left out without --http, got '1'"),
        (["--keep-sessions", "3"], "--keep-sessions must be left out without --http, got 3"),
        (["--http", "0", "--sampler-address", "u"], "--sampler-address must be given with"),
        (["--http=0", "--sampler=sglang"], "--sampler sglang must be given with --sampler-address"),
        (["--http=0", "--sampler-memory=9"], "--sampler-memory must be given with --sampler own"),
        (
            ["--http=0", "--sampler-memory=1e6", "--sampler-gpu=0"],
            "--sampler-memory must leave gangs a part of a GPU's",
        ),
        (["--http", "0", "--sampler-words=-x"], "--sampler-words must be given with"),
        (["--http=0", "--sampler=vllm", "--sampler-words=--port=1"], "must leave --port=1 to the"),
        (["--http=0", "--sampler=vllm", "--sampler-words='"], "must be words of vllm serve, got"),
        (["--http=0", "--sampler=vllm", "--sampler-address=ftp://u"], "must be a URL such as http"),
        (
            ["--http=0", "--sampler=vllm", "--sampler-address=http://u", "--sampler-words=--x=1"],
            "--sampler-words must hold --max-loras and --max-lora-rank alone of servers",
        ),
        (
            ["--http", "0", "--sampler", "off", "--sampler-gpu", "1"],
            "--sampler-gpu must be left out with --sampler off, got '1'",
        ),
        (
            ["--http", "0", "--sampler", "vllm", "--sampler-address", "u", "--sampler-gpu", "1"],
            "--sampler-gpu must be left out with --sampler-address, whose server",
        ),
    ],
)
def test_wrong_options_leave_nothing_behind(
    words: list[str], sentence: str, tmp_path: Path, tlora: Tlora
) -> None:
    folder = tmp_path / "service"
    assert sentence in tlora("serve", "--service", folder, *words, code=2)
    assert not folder.exists()


def test_a_port_in_use_leaves_nothing_behind(
    tmp_path: Path, tlora: Tlora, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "_FORMER_S", 0.0)
    folder = tmp_path / "service"
    with listen(Place("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = tlora("serve", "--service", folder, "--http", port, code=2)
    assert "--http must be a free port of this host" in said
    assert not tlora.out
    assert not folder.exists()


def test_a_token_is_shown_once_and_can_be_taken_back(store: Store, tlora: Tlora) -> None:
    secret = tlora("token", "create", "ann", "--gpus", "2", "--requests-per-s", "9.5").strip()
    assert secret.startswith("tml-tlora-")
    assert len(secret) == len("tml-tlora-") + 43
    found = store.tokens.find(secret)
    assert found is not None
    assert (found.tenant, found.scopes) == ("ann", ("submit", "read"))
    assert (store.tenants.limits("ann").gpus, store.tenants.limits("ann").jobs) == (2, 1000)
    (row,) = tlora.json("token", "list")
    assert row["id"] == found.id
    assert secret not in str(row)
    assert found.id in tlora("token", "list")
    tlora("token", "revoke", found.id)
    assert store.tokens.find(secret) is None


def test_limits_are_changed_one_by_one(store: Store, tlora: Tlora) -> None:
    assert "bob: gpus all, jobs 7, upload_bytes 10000000000" in tlora(
        "token", "limit", "bob", "--jobs", "7"
    )
    assert tlora.json("token", "limit", "bob", "--upload-bytes", "5") == {
        "gpus": None,
        "jobs": 7,
        "upload_bytes": 5,
        "disk_bytes": None,
        "requests_per_s": 50.0,
    }


def test_whoever_serves_finds_a_tenant_s_job_by_its_id_alone(store: Store, tlora: Tlora) -> None:
    job = put_job(store, "theirs")
    tlora("cancel", "theirs", code=2)
    tlora("cancel", job)
    assert store.jobs.get(job).wish == "cancel"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["create", "../ann"], "a tenant's name must be at most 32 lower-case letters"),
        (["create", "ann", "--scope", "all"], "a scope must be one of"),
        (["create", "ann", "--jobs", "-1"], "--jobs must be at least 0, got -1"),
        (["revoke", "t0"], "a token's id must be one of the store's, got 't0'; `tlora token list`"),
    ],
)
def test_mistakes_are_refused_and_make_nothing(
    store: Store, tlora: Tlora, argv: list[str], sentence: str
) -> None:
    assert sentence in tlora("token", *argv, code=2)
    assert store.tokens.all() == []


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


def test_a_log_in_json_holds_no_token(home: Home, store: Store) -> None:
    words = ["serve", "--http", "0", "--sampler", "off", "--log-format", "json"]
    said: list[str] = []
    with open_http(build_parser().parse_args(words), home, store, said.append):
        assert re.fullmatch(r"page: http://127\.0\.0\.1:\d+/", said[0])


def test_a_log_in_json_is_an_object_a_line(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    job = put_job(store)
    board = Board(store, JsonConsole(), "a service")
    board.say_changes(0)
    board.say("the store refuses to write")
    change, trouble = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert {
        "message": f"a ({job}) submitted",
        "tenant": "ann",
        "job": job,
    }.items() <= change.items()
    assert (trouble["level"], trouble["message"]) == ("info", "the store refuses to write")
    broken = (ValueError, ValueError("x\ny"), None)
    record = logging.LogRecord("tlora", logging.ERROR, "", 0, "got %d", (3,), broken)
    found = json.loads(formatter("json", "").format(record))
    assert (found["level"], found["message"], found["error"]) == (
        "error",
        "got 3",
        "ValueError: x\ny",
    )


def test_what_is_said_is_in_the_folder_with_dates(store: Store, home: Home) -> None:
    board, _ = board_on(store)
    with kept_log(home.root, "text"):
        board.say("page: http://h:1/#token=secret")
        logging.getLogger("tlora_megatron.x").warning("a warning")
        logging.getLogger("x").warning("another's")
    board.say("not kept")
    log = (home.root / LOG_NAME).read_text()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d .*INFO: page: http://h:1/\n.*WARNING: a warning\n", log, re.DOTALL
    )


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
