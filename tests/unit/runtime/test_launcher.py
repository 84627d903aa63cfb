"""Ranks and the torchrun agent that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.helpers.launch import HANG_S
from tlora_megatron.runtime import ranks


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store that an agent gives all lives of its ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=HANG_S))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def client(shared: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", shared.port, is_master=False, timeout=timedelta(seconds=HANG_S))


def meet(shared: TCPStore, world_size: int) -> list[int]:
    """The port that each rank of one life learns."""
    with ThreadPoolExecutor(world_size) as threads:
        first = threads.submit(ranks._welcome, client(shared), world_size)
        others = [
            threads.submit(ranks._arrive, client(shared), rank) for rank in range(1, world_size)
        ]
        return [task.result(HANG_S) for task in (first, *others)]


def test_all_ranks_of_a_life_learn_one_port(shared: TCPStore) -> None:
    for _ in range(3):
        ports = meet(shared, 3)
        assert len(set(ports)) == 1
        assert ports[0] != shared.port


def test_what_an_earlier_life_left_misleads_nobody(shared: TCPStore) -> None:
    meet(shared, 2)
    # A life in which rank 1 came and rank 0 did not.
    shared.set("tlora/visit/1", "stale")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ranks._welcome, client(shared), 2)
        time.sleep(0.3)
        assert not first.done(), "rank 0 must wait for rank 1 of its own life"
        other = threads.submit(ranks._arrive, client(shared), 1)
        assert first.result(HANG_S) == other.result(HANG_S)


def test_ranks_that_do_not_come_are_named(
    shared: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_MEET_S", 0.2)
    with pytest.raises(RuntimeError, match=r"ranks must meet within 0.2 s, got none of \[1, 2\]"):
        ranks._welcome(client(shared), 3)


def test_only_ranks_that_torchrun_may_restart_get_a_new_store(
    shared: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks.ctypes, "CDLL", lambda _: _Nothing())
    ranks.join_agent()
    assert os.environ["MASTER_PORT"] == str(shared.port)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    ranks.join_agent()
    assert os.environ["MASTER_PORT"] != str(shared.port)
    # torch's own way to a process group now opens a store at that port.
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"


class _Nothing:
    """A C library in which the test process is not tied to its parent."""

    def prctl(self, *_: object) -> int:
        return 0


def test_without_torchrun_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(ranks.ctypes, "CDLL", lambda _: pytest.fail("must not be called"))
    ranks.join_agent()


def test_a_rank_ends_with_its_agent() -> None:
    rank = (
        "from tlora_megatron.runtime.ranks import join_agent; import time; join_agent(); "
        "print('joined', flush=True); time.sleep(3600)"
    )
    agent = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {rank!r}]); "
        "print(child.pid, flush=True); child.wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", agent],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_MAX_RESTARTS": "0"},
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    assert process.stdout.readline() == "joined\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    end_s = time.monotonic() + HANG_S
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s, "the rank must end with its agent"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:1: reset by peer"),
        RuntimeError("Gloo connectFullMesh failed with timed out connecting"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        dist.DistBackendError("NCCL error: ncclRemoteError: a remote process has exited\nmore"),
    ],
)
def test_a_lost_connection_is_explained(error: RuntimeError) -> None:
    said = ranks.describe_failure(error)
    assert said.startswith("the connection to another process of this run is lost")
    assert str(error).splitlines()[0] in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("lora.rank must be at least 1, got 0"),) * 2, (RuntimeError(), "RuntimeError")],
)
def test_other_errors_speak_for_themselves(error: Exception, said: object) -> None:
    assert ranks.describe_failure(error) == str(said)
