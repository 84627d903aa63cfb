"""The ranks of one machine: how they start, meet, are signalled, and end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.helpers.launch import HANG_S
from tlora_megatron import timeline
from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunConfig, RunSpec
from tlora_megatron.runtime import backbone, controller, ranks
from tlora_megatron.runtime.backbone import wake_device
from tlora_megatron.training.run.determinism import ENVIRONMENT

FOREVER = "while :; do sleep 0.05; done"


@pytest.fixture(autouse=True)
def _flag(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAG", f"{tmp_path}/flag")


def run(script: str, nproc: int = 2, *, stop_timeout_s: float = HANG_S) -> int:
    """The exit code of ranks that are shell scripts; their agent is this process."""
    return ranks.run_ranks(["bash", "-c", script], nproc, stop_timeout_s=stop_timeout_s)


def signal_agent(number: signal.Signals) -> str:
    """A script in which rank 0 of two sends a signal to the agent once rank 1 is as far."""
    wait = "until [ -e $FLAG.1 ]; do sleep 0.02; done"
    return f"touch $FLAG.$RANK; [ $RANK = 0 ] && {{ {wait}; kill -{number.value} $PPID; }}"


def test_the_first_failure_s_exit_code_comes_back_and_the_others_are_ended() -> None:
    assert run("exit 0") == 0
    assert run(f"[ $RANK = 1 ] && exit 7; {FOREVER}", 3) == 7


def test_ranks_that_do_not_listen_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_GRACE_S", 0.1)
    assert run(f"trap '' TERM; [ $RANK = 1 ] && exit 7; {FOREVER}") == 7


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_ended_by_a_signal_is_named(victim: int, caplog: pytest.LogCaptureFixture) -> None:
    assert run(f"[ $RANK = {victim} ] && kill -9 $$; {FOREVER}") == 137
    (line,) = caplog.messages
    host = socket.gethostname()
    assert f"rank {victim} on host {host} was ended by signal 9 (SIGKILL; " in line


def test_of_two_that_ended_at_once_the_silent_one_is_to_blame(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = ranks._Ranks(2, HANG_S)
    dead = [_Ended(1), _Ended(-signal.SIGSEGV)]
    group._living = dict(enumerate(dead))  # type: ignore[arg-type]
    group._collect()
    assert group._failure == 128 + signal.SIGSEGV
    assert "rank 1 on host" in caplog.text


class _Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self._code = code

    def poll(self) -> int:
        return self._code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_rank(number: signal.Signals) -> None:
    script = f"trap 'exit {128 + number}' {number.value}; {signal_agent(number)}; {FOREVER}"
    before = signal.getsignal(number)
    assert run(script) == 128 + number
    assert signal.getsignal(number) is before


def test_a_rank_that_does_not_end_behind_a_signal_is_killed_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stops = "[ $RANK = 0 ] && exit 143"
    script = f"trap '' TERM; {signal_agent(signal.SIGTERM)}; {stops}; {FOREVER}"
    assert run(script, stop_timeout_s=0.2) == 143
    assert "rank 1 on host" in caplog.text
    assert "did not end within 0.2 s of SIGTERM (run.stop_timeout_s)" in caplog.text


def test_a_signal_to_one_rank_stops_all(caplog: pytest.LogCaptureFixture) -> None:
    assert run(f"[ $RANK = 1 ] && exit 138; trap 'exit 138' USR1; {FOREVER}") == 138
    assert not caplog.messages


def test_a_run_that_completes_in_spite_of_a_signal_has_succeeded() -> None:
    assert run(f"trap '' TERM; {signal_agent(signal.SIGTERM)}; sleep 0.1") == 0


def test_ranks_find_each_other_as_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    found = ranks.rank_environment(1, 4, 20001)
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "20001"}
    assert found.items() >= {**expected, "OMP_NUM_THREADS": "5"}.items()
    assert float(found[timeline.BEGIN_VARIABLE]) == timeline.process_timeline().begin_s
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert ranks.rank_environment(0, 10**6, 20001)["OMP_NUM_THREADS"] == "1"


def test_a_port_is_free_and_no_outgoing_connection_takes_it() -> None:
    port = ranks.free_port()
    assert port < 32768
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


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


SCRIPT = """
import atexit, sys, threading, time
from tlora_megatron.runtime.ranks import leave

class Torn:
    def __del__(self):
        print("torn down")

torn = Torn()
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("end")
leave(3)
"""


@pytest.mark.parametrize(("variable", "last"), [("", []), ("LD_PRELOAD", ["torn down"])])
def test_threads_handlers_and_output_are_waited_for(variable: str, last: list[str]) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=inherited | ({variable: ""} if variable else {}),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.split("\n")[:-1] == ["end", "thread", "handler", *last]


class Woken(Exception):
    """The device is about to start."""


def test_variables_are_set_before_the_device_starts(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wake() -> None:
        assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
        raise Woken

    for name in (*ENVIRONMENT, "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(backbone, "wake_device", wake)
    config = RunConfig(
        base_model=BaseModelSpec(config=str(repo / "configs/models/llama-3.1-8b.json")),
        parallel=ParallelSpec(),
        run=RunSpec(output_dir="out", deterministic=True),
        jobs=(),
    )
    with pytest.raises(Woken):
        controller.train_run(config)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("local_rank", ["0", "99"])
def test_what_is_wrong_with_a_device_is_not_said_here(
    monkeypatch: pytest.MonkeyPatch, local_rank: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    for is_there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=is_there: found)
        thread = wake_device()
        thread.join(HANG_S)
        assert not thread.is_alive()
