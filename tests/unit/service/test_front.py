"""Processes of a service: how they start, die, start again and end; HTTP's, and the pool's."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.http_service import bearer
from tests.helpers.launch import HANG_S, wait_until
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.service.engines.protocol import WorkerSlots
from tlora_megatron.service.front import TOKEN_NAME, Front, Place, listen, own_token
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare import pool as pool_module
from tlora_megatron.service.prepare.pool import PreparePool
from tlora_megatron.service.prepare.submission import Outcome, PrepareRules, Submission
from tlora_megatron.service.store import open_store
from tlora_megatron.service.supervisor import Child


def test_a_process_that_is_killed_starts_again_and_no_connection_is_refused(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "service")
    listener = listen(Place("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/jobs"
    said: list[str] = []
    words = ["--sampler", "off", "--log-format", "json"]
    with open_store(home.store) as store:
        token = own_token(home, store)
        with Front(home, listener, words=words, say=said.append) as front:
            answer = httpx.get(url, headers=bearer(token), timeout=HANG_S)
            assert answer.json()["jobs"] == []
            assert front.child is not None
            first = front.child.pid
            os.kill(first, signal.SIGKILL)
            answer = httpx.get(url, headers=bearer(token), timeout=HANG_S)
            assert answer.status_code == 200
            assert said == ["the process of HTTP ended with code -9: it starts again"]
            second = front.child.pid
        assert second != first
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)


def test_a_port_is_waited_for_that_a_killed_service_has_for_seconds() -> None:
    with listen(Place("127.0.0.1", 0)) as held:
        place = Place(*held.getsockname())
        timer = threading.Timer(0.3, held.close)
        timer.start()
        listen(place).close()


def test_the_process_ends_with_a_controller_that_was_killed(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "service")
    open_store(home.store).close()
    listener = listen(Place("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/jobs"
    front = Front(home, listener, words=["--sampler", "off"], say=lambda _: None)
    front.__enter__()
    assert httpx.get(url, timeout=HANG_S).status_code == 401
    child = front.child
    assert child is not None
    front._stop.set()
    child.pipe.close()  # as the kernel does at the end of the process that holds it
    wait_until(lambda: child.exit_code is not None, "its end")
    front.__exit__()


def test_the_own_token_is_kept_and_made_anew_when_it_is_revoked(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "service")
    with open_store(home.store) as store:
        token = own_token(home, store)
        assert own_token(home, store) == token
        assert (home.root / TOKEN_NAME).stat().st_mode & 0o777 == 0o600
        found = store.tokens.find(token)
        assert found is not None
        assert (found.tenant, "admin" in found.scopes) == ("local", True)
        store.tokens.revoke(found.id)
        assert own_token(home, store) != token


@pytest.mark.parametrize(
    ("text", "place", "url", "is_loopback"),
    [
        ("8017", ("127.0.0.1", 8017), "http://127.0.0.1:8017", True),
        ("0.0.0.0:1", ("0.0.0.0", 1), "http://127.0.0.1:1", False),
        ("[::1]:80", ("::1", 80), "http://[::1]:80", True),
        ("host.lan:80", ("host.lan", 80), "http://host.lan:80", False),
    ],
)
def test_places(text: str, place: tuple[str, int], url: str, is_loopback: bool) -> None:
    found = Place.read(text)
    assert (tuple(found), found.url, found.is_loopback) == (place, url, is_loopback)


@pytest.mark.parametrize("text", ["", "http://a:1", "99999", "a:b", "::1:80"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--http must be PORT or HOST:PORT"):
        Place.read(text)


def test_answers_do_not_wait_for_the_acknowledgement_of_their_first_part() -> None:
    with (
        listen(Place("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


ECHO = """
import sys
from tlora_megatron.channel import LinePipe
pipe = LinePipe.of_child()
print("words of a library")
while not pipe.is_over:
    pipe.wait()
    for message in pipe.receive():
        pipe.send({"got": message})
"""

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("stands", flush=True)
time.sleep(1000)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_child_speaks_through_its_pipe_and_ends_with_it(tmp_path: Path) -> None:
    child = Child(python(ECHO), log=tmp_path / "log", wire="lines")
    child.pipe.send({"a": 1})
    child.pipe.wait(HANG_S)
    assert child.pipe.receive() == [{"got": {"a": 1}}]
    assert child.exit_code is None
    assert child.end(HANG_S) == 0
    assert child.last_words == "words of a library"
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_child_that_heeds_nothing_is_killed(tmp_path: Path) -> None:
    child = Child(python(STUBBORN), log=tmp_path / "log", wire="stdin")
    while child.last_words != "stands":
        assert child.exit_code is None
    assert child.end(grace_s=0.05) == -signal.SIGKILL
    assert child.handle.fileno() < 0


def test_command_that_is_missing_leaves_nothing_open(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Child([str(tmp_path / "missing")], log=tmp_path / "log", wire="lines")
    assert sorted(os.listdir("/proc/self/fd")) == before


STUB = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    what = asked["submission"]["name"]
    if what == "sleep":
        time.sleep(1000)
    if what == "exit":
        print('{"refu', end="", flush=True)
        sys.exit(7)
    if what == "kill once" and not os.path.exists(asked["rules"]["root"]):
        open(asked["rules"]["root"], "w").close()
        what = "kill"
    if what == "kill":
        os.kill(os.getpid(), 9)
    said = {"job": asked["job"], "error": f"{what} {asked['rules']['root']} {os.getpid()}"}
    print(json.dumps({"refused": said}), flush=True)
"""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the processes of pools do a stub's work."""
    monkeypatch.setattr(pool_module, "COMMAND", [sys.executable, "-S", "-c", STUB])


@pytest.fixture
def pool(stub: None) -> Iterator[PreparePool]:
    with PreparePool(PrepareRules(root="/r"), workers=1) as made:
        yield made
    assert made._workers == []


def _submission(name: str, **data: str) -> Submission:
    return Submission(name=name, base_model={}, document={"data": data})


def _outcomes(pool: PreparePool, count: int) -> list[Outcome]:
    found: list[Outcome] = []
    end = time.monotonic() + HANG_S
    while len(found) < count and time.monotonic() < end:
        select.select([w.child.pipe for w in pool._workers], [], [], 1.0)
        found += pool.poll()
    return found


def test_one_process_answers_one_job_after_the_other(pool: PreparePool) -> None:
    pool.warm()
    for job in ("j1", "j2", "j3"):
        pool.submit(job, _submission("good"))
    outcomes = _outcomes(pool, 3)
    assert [outcome.job for outcome in outcomes] == ["j1", "j2", "j3"]
    assert len({outcome.error for outcome in outcomes}) == 1  # type: ignore[union-attr]
    assert pool.poll() == []


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (
            "kill",
            r"was ended by SIGKILL 3 times, as when the host's memory is full; submit it again",
        ),
        ("exit", r"ended with code 7; submit it again"),
    ],
)
def test_a_death_is_told_for_its_job_and_the_next_gets_a_new_process(
    pool: PreparePool, name: str, how: str
) -> None:
    for job, what in (("j1", name), ("j2", "good")):
        pool.submit(job, _submission(what))
    dead, good = _outcomes(pool, 2)
    assert dead.job == "j1"
    assert dead.error == (  # type: ignore[union-attr]
        f"job {name!r} could not be checked: the process that read it {how}"
    )
    assert good.error.startswith("good /r")  # type: ignore[union-attr]


def test_a_job_whose_process_is_killed_is_read_again(stub: None, tmp_path: Path) -> None:
    with PreparePool(PrepareRules(root=str(tmp_path / "killed"))) as pool:
        pool.submit("j1", _submission("kill once"))
        (outcome,) = _outcomes(pool, 1)
    assert outcome.error.startswith("kill once")  # type: ignore[union-attr]


def test_priority_comes_first_and_large_files_leave_a_process_to_others(
    stub: None, tmp_path: Path
) -> None:
    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        file.truncate(5 << 20)
    with PreparePool(PrepareRules(root="/r")) as pool:
        for job in ("large", "larger"):
            pool.submit(job, _submission("sleep", train=str(large)))
        for job, priority in (("j1", 0), ("j2", 0), ("j3", 9)):
            pool.submit(job, _submission("good"), priority)
        assert [outcome.job for outcome in _outcomes(pool, 3)] == ["j1", "j3", "j2"]
        assert len(pool._workers) == 2


def test_a_death_between_two_jobs_harms_none(pool: PreparePool) -> None:
    pool.submit("j1", _submission("good"))
    (first,) = _outcomes(pool, 1)
    os.kill(int(first.error.split()[-1]), 9)  # type: ignore[union-attr]
    while not select.select([w.child.pipe for w in pool._workers], [], [], HANG_S)[0]:
        pass
    pool.submit("j2", _submission("good"))
    (second,) = _outcomes(pool, 1)
    assert second.job == "j2"


def test_what_is_forgotten_is_ended_and_not_told(pool: PreparePool) -> None:
    for job, what in (("j1", "sleep"), ("j2", "sleep"), ("j3", "sleep"), ("j4", "good")):
        pool.submit(job, _submission(what))
    pool.forget({"j2"})
    pool.forget({"j1", "j3"})
    (outcome,) = _outcomes(pool, 1)
    assert outcome.job == "j4"


def test_a_job_that_takes_too_long_is_given_up(stub: None) -> None:
    with PreparePool(PrepareRules(root="/r"), limit_s=0.0) as pool:
        pool.submit("j1", _submission("sleep"))
        (outcome,) = pool.poll()
        assert pool._workers == []
    assert "could not be checked within 0 s" in outcome.error  # type: ignore[union-attr]


def test_a_slot_of_several_cores_has_a_worker_that_can_be_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    environment = WorkerSlots(devices=(), count=1).environment(0)
    assert environment["OMP_NUM_THREADS"] == "4"
    code = "import numpy, os; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout == "1\n", done.stderr
