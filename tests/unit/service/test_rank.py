"""Ranks of a gang: their last words, and that they notice when one of them is gone."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_case import spec
from tests.helpers.launch import HANG_S, REPO
from tests.helpers.watched_rank import FileStore
from tlora_megatron.parallel.groups import host_threads
from tlora_megatron.service.messages import GangFolder
from tlora_megatron.service.worker import peers as module
from tlora_megatron.service.worker import rank as rank_module
from tlora_megatron.service.worker.gang_logs import CommandReader, EventWriter
from tlora_megatron.service.worker.peers import leave_together, peer_watchdog
from tlora_megatron.service.worker.rank import (
    FAILED,
    LEASE_OVER,
    OUT_OF_MEMORY,
    RankProcess,
    run_rank,
)


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.fixture
def folder(tmp_path: Path) -> GangFolder:
    folder = GangFolder(tmp_path, "g", 1)
    folder.create(spec(tmp_path, lease_s=0.0))
    return folder


def ending(folder: GangFolder, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder.path / f"end_{rank}.json").read_text()))


def test_memory_that_is_gone_is_told_with_the_new_jobs(folder: GangFolder) -> None:
    process = RankProcess(folder.spec(), 1, folder)
    process.emit("out_of_memory", None, {"joining": ["j4"]})
    assert process.fail(OutOfMemoryError("20 GiB of 1 GiB")) == OUT_OF_MEMORY
    found = ending(folder, 1)
    assert (found["out_of_memory"], found["newcomers"]) == (True, ["j4"])
    assert found["reason"] == "20 GiB of 1 GiB"


def test_lost_peer_is_not_memory(folder: GangFolder) -> None:
    process = RankProcess(folder.spec(), 0, folder)
    assert process.fail(RuntimeError("[gloo/transport/tcp/pair.cc:1] closed by peer")) == FAILED
    found = ending(folder, 0)
    assert (found["is_lost"], found["newcomers"]) == (True, [])


def test_stop_past_the_lease_is_not_told_as_one(folder: GangFolder) -> None:
    own = folder.spec()
    process = RankProcess(own, 0, folder)
    process.commands = CommandReader(own, folder.commands())
    process.events = EventWriter(own, folder.events())
    process.emit("stopped", None, {})
    assert folder.events().last() is None
    assert "nothing was heard of a controller" in ending(folder, 0)["reason"]
    assert LEASE_OVER not in (0, FAILED, OUT_OF_MEMORY)


def test_rank_that_misses_another_one_ends_and_blames_nobody(
    folder: GangFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(rank_module, "end", codes.append)
    RankProcess(folder.spec(), 0, folder)._miss()
    assert ending(folder, 0)["is_lost"]
    process = RankProcess(folder.spec(), 1, folder)
    process.fail(OutOfMemoryError("20 GiB of 1 GiB"))
    process._miss()
    assert ending(folder, 1)["out_of_memory"], "its own reason stays"
    assert codes == [FAILED, FAILED]


def test_ranks_leave_together() -> None:
    from torch.distributed import HashStore

    store = HashStore()
    other = threading.Thread(target=leave_together, args=(store, 1), daemon=True)
    other.start()
    other.join(0.2)
    assert other.is_alive()
    leave_together(store, 0)
    other.join(HANG_S)
    assert not other.is_alive()


def test_rank_that_cannot_begin_says_why(
    folder: GangFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ImportError("pip install triton")

    monkeypatch.setattr(rank_module, "import_all", refuse)
    keep_surroundings(monkeypatch)
    assert run_rank(folder.spec(), 1, folder=folder) == FAILED
    assert ending(folder, 1)["reason"] == "pip install triton"


def keep_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what a rank sets of its process when the test is over."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(rank_module.logging, "basicConfig", lambda **_: None)


def test_ranks_of_a_node_share_its_cores(
    folder: GangFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(RankProcess, "serve", lambda *_: host_threads(64))
    keep_surroundings(monkeypatch)
    wide = replace(folder.spec(), gpus=((0, 0), (0, 1), (0, 2), (1, 0)))
    assert [run_rank(wide, rank, folder=folder) for rank in (1, 3)] == [4, 12]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    return FileStore(tmp_path / "place")


def other(store: FileStore, rank: int) -> subprocess.Popen[str]:
    """Another rank, in its block."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.watched_rank", store.path, str(rank)],
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


def test_others_are_neither_let_in_nor_missed(store: FileStore) -> None:
    missed = threading.Event()
    with rank(store, 0, missed.set):
        host, port, token = json.loads(store.get(""))
        with socket.create_connection((host, port)) as other:
            other.sendall(b"x" * len(token))
            assert other.recv(1) == b""
        assert not missed.wait(0.1)
