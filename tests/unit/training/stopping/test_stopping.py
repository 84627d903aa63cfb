"""How a run stops: by signals, and when it stands still because ranks do not answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.helpers.launch import HANG_S, environment
from tlora_megatron.training import run_watch
from tlora_megatron.training.run_watch import Beat, HangWatch
from tlora_megatron.training.signals import (
    STOP_SIGNALS,
    SignalCounter,
    StopSignals,
    exit_code,
    is_stop_code,
    stop_sentence,
)

SET_UP = """
import os, signal, sys, time
from tlora_megatron.training.signals import StopSignals
signals = StopSignals(speaks=True)
def wait():
    while True:
        time.sleep(0.01)
def send(number):
    os.kill(os.getpid(), number)
    while signals.received == 0:
        time.sleep(0.01)
"""


def start(script: str) -> tuple[int, str]:
    """Exit code and stderr of a process that imports no torch."""
    check = "assert 'torch' not in sys.modules\n"
    result = subprocess.run(
        [sys.executable, "-c", SET_UP + check + script], env=environment(), check=False,
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    return result.returncode, result.stderr


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_the_first_round_a_signal_ends_at_once(number: signal.Signals) -> None:
    code, said = start(f"with signals.install():\n os.kill(os.getpid(), {number.value}); wait()")
    assert code == 128 + number
    assert said == f"stopped by {number.name} before the first round: there is nothing to save\n"


def test_a_process_that_waits_in_c_ends_too() -> None:
    # The main thread never gets to run a handler of Python.
    code, _ = start(
        "import ctypes, threading\n"
        "with signals.install():\n"
        " threading.Timer(0.1, os.kill, (os.getpid(), 15)).start()\n"
        " while True: ctypes.CDLL(None).sleep(3600)"
    )
    assert code == 143


def test_in_rounds_the_first_waits_and_the_second_ends_at_once() -> None:
    code, said = start(
        "with signals.install():\n"
        " signals.hold(); send(10); assert signals.received == 10\n"
        " os.kill(os.getpid(), 15); wait()"
    )
    assert code == 143
    first, second = said.splitlines()
    assert first.startswith("SIGUSR1: the round under way ends and all jobs are saved")
    assert second.startswith("ended by a second signal, SIGTERM")


def test_behind_the_block_everything_is_as_before() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    signals = StopSignals(speaks=False)
    signals.hold()
    with signals.install():
        os.kill(os.getpid(), signal.SIGUSR1)
        while not signals.received:
            time.sleep(0.01)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_what_is_ignored_or_handled_by_a_script_stays_so() -> None:
    code, said = start(
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('mine', file=sys.stderr))\n"
        "with signals.install():\n"
        " os.kill(os.getpid(), 2); os.kill(os.getpid(), 10); time.sleep(0.1)"
    )
    assert (code, said) == (0, "mine\n")


def test_the_same_signal_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = SignalCounter()
    assert [counter.count(10), counter.count(10), counter.count(15)] == [False, False, True]
    assert counter.first == 10
    patient = SignalCounter()
    assert not patient.count(15)
    monkeypatch.setattr(SignalCounter, "SAME_S", -1.0)
    assert patient.count(15)


def test_exit_codes_are_those_of_shells() -> None:
    codes = [exit_code(number) for number in STOP_SIGNALS]
    assert codes == [143, 130, 138]
    assert all(map(is_stop_code, codes))
    assert not any(map(is_stop_code, (0, 1, 2, 137, 139)))


def test_the_line_says_what_is_saved() -> None:
    names = ["a", "b", "c"]
    said = "stopped by SIGTERM after round 412; all 3 jobs are saved; the same command continues"
    assert stop_sentence(15, 412, names, ()) == said
    assert "; job a is saved; " in stop_sentence(15, 1, ["a"], ())
    assert "; 2 of 3 jobs are saved, but not b; " in stop_sentence(15, 1, names, ["ended", "b"])


LIMIT_S = 0.4


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_watch, "_FIRST_ROUNDS", 0)
    monkeypatch.setattr(run_watch, "_LOOK_S", 0.1)


class Run:
    """Rank 0 of two on this process; the other one is what the store says."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.has_ended = threading.Event()
        self.reason = ""
        self.set_other(Beat(7, 0.0, "far", "round 3"))
        self.signals = StopSignals(speaks=False)
        self.watch = HangWatch(LIMIT_S, self.store, 0, 2, signals=self.signals, end=self._end)

    def set_other(self, beat: Beat) -> None:
        self.store.set("1", json.dumps(beat))

    def _end(self, reason: str) -> None:
        self.reason = reason
        self.has_ended.set()


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.watch.close()


def test_a_rank_that_has_stopped_is_named(run: Run) -> None:
    with run.watch.watching():
        run.watch.tick("round 4")
        assert run.has_ended.wait(HANG_S)
    found = f"the run has stood still for {LIMIT_S} s (run.hang_timeout_s), in round 4"
    assert run.reason == f"{found}: rank 1 on host far does not answer"


@pytest.mark.slow
def test_a_signal_does_not_wait_for_a_dead_rank(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(run_watch, "_FIRST_ROUNDS", 1)  # there is patience for 600 s
    with run.watch.watching():
        run.watch.tick("round 4")
        assert not run.has_ended.wait(2 * LIMIT_S)
        run.signals._counter.count(15)
        assert run.has_ended.wait(HANG_S)
    assert run.reason.startswith("the run cannot stop behind its round, in round 4: rank 1 on")


@pytest.mark.slow
def test_who_gets_on_or_is_outside_of_the_loop_is_left_alone(run: Run) -> None:
    end_s = time.monotonic() + 3 * LIMIT_S
    with run.watch.watching():
        while time.monotonic() < end_s:
            run.watch.tick("round 4")
            time.sleep(LIMIT_S / 10)
    assert not run.has_ended.wait(2 * LIMIT_S)


def test_a_store_that_has_gone_is_told(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(run.watch, "_store", Gone())
    with run.watch.watching():
        assert run.has_ended.wait(HANG_S)
    assert ": rank 0 on host" in run.reason
    assert run.reason.endswith(", which keeps the run's store, does not answer")


class Gone:
    """The connection to a store whose process has ended."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer")


def judge(run: Run, *others: tuple[Beat, Beat]) -> str:
    """The verdict of rank 0, which has stood still, on ranks seen twice."""
    mine = Beat(1, LIMIT_S, "near", "round 4")
    before, after = zip((mine, mine), *others, strict=True)
    return run.watch._judge(before, after)


def test_verdicts(run: Run) -> None:
    silent = (Beat(5, 0.1, "b", "round 4"),) * 2
    hung = (Beat(5, LIMIT_S, "b", "a save"), Beat(6, LIMIT_S, "b", "a save"))
    working = (Beat(5, LIMIT_S, "c", "a save"), Beat(6, 0.0, "c", "a save"))
    outside = (Beat(5, -1.0, "c", "a save"), Beat(6, -1.0, "c", "a save"))
    assert judge(run, hung, silent) == "rank 2 on host b does not answer"
    assert judge(run, silent, silent) == "rank 1 on host b, rank 2 on host b do not answer"
    assert judge(run, hung, working) == judge(run, hung, outside) == ""
    expected = "every rank answers, but none gets on: ranks [0] in round 4; ranks [1, 2] in a save"
    assert judge(run, hung, hung) == expected


def test_the_first_rounds_have_longer(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(run_watch, "_FIRST_ROUNDS", 3)
    patience = []
    for _ in range(4):
        patience.append(run.watch._patience_s)
        run.watch.end_round()
    assert patience == [600.0, 600.0, 600.0, LIMIT_S]
