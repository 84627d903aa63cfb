"""Ranks of a gang notice that one of them is gone, whoever else watches."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.launch import HANG_S, REPO
from tlora_megatron.service.worker import peers as module
from tlora_megatron.service.worker.peers import peer_watchdog

_CHILD = """
import sys
from pathlib import Path
from tests.unit.service.test_peer_watchdog import FileStore
from tlora_megatron.service.worker.peers import peer_watchdog
with peer_watchdog(FileStore(Path(sys.argv[1])), int(sys.argv[2]), 3, "127.0.0.1", lambda: None):
    print("in", flush=True)
    sys.stdin.readline()
"""


class FileStore:
    """A store with only what a watchdog needs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def set(self, key: str, value: str) -> None:
        self.path.with_suffix(".new").write_text(value)
        self.path.with_suffix(".new").rename(self.path)

    def get(self, key: str) -> bytes:
        while not self.path.exists():
            time.sleep(0.005)
        return self.path.read_bytes()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    return FileStore(tmp_path / "place")


def other(store: FileStore, rank: int) -> subprocess.Popen[str]:
    """Another rank, in its block."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(store.path), str(rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "in\n"
    return child


def rank(store: FileStore, number: int, missed: Callable[[], None]):  # type: ignore[no-untyped-def]
    return peer_watchdog(store, number, 3, "127.0.0.1", missed)  # type: ignore[arg-type]


def test_rank_0_notices_and_tells_the_others(store: FileStore) -> None:
    at_0, at_1 = threading.Event(), threading.Event()
    with rank(store, 0, at_0.set), rank(store, 1, at_1.set):
        child = other(store, 2)
        child.send_signal(signal.SIGKILL)
        assert at_0.wait(HANG_S)
        assert at_1.wait(HANG_S)
    child.wait()


def test_the_others_notice_the_end_of_rank_0(store: FileStore) -> None:
    missed = threading.Event()
    child = other(store, 0)
    with rank(store, 1, missed.set):
        child.send_signal(signal.SIGKILL)
        assert missed.wait(HANG_S)
    child.wait()


@pytest.mark.parametrize("number", [0, 1])
def test_who_leaves_as_asked_is_not_missed(store: FileStore, number: int) -> None:
    missed = threading.Event()
    if number == 1:
        child = other(store, 0)
    with rank(store, number, missed.set):
        if number == 0:
            child = other(store, 1)
        child.communicate("\n")
        assert child.returncode == 0
        assert not missed.wait(0.3)


def test_who_leaves_at_once_has_said_goodbye_to_all(store: FileStore) -> None:
    missed = threading.Event()
    first = module._Watchdog(missed.set)
    first.open(store, "127.0.0.1")  # type: ignore[arg-type]
    with rank(store, 1, missed.set):
        first.leave()
        assert not missed.wait(0.1)


def test_strangers_are_neither_let_in_nor_missed(store: FileStore) -> None:
    missed = threading.Event()
    with rank(store, 0, missed.set):
        host, port, token = json.loads(store.get(""))
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(b"x" * len(token))
            assert stranger.recv(1) == b""
        assert not missed.wait(0.1)
