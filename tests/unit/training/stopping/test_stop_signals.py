"""Signals that stop a run end its process as they should; each case has a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.launch import HANG_S, environment
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


def run(script: str) -> tuple[int, str]:
    """Exit code and stderr of a process that imports no torch."""
    check = "assert 'torch' not in sys.modules\n"
    result = subprocess.run(
        [sys.executable, "-c", SET_UP + check + script],
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    return result.returncode, result.stderr


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_the_first_round_a_signal_ends_at_once(number: signal.Signals) -> None:
    code, said = run(f"with signals.install():\n os.kill(os.getpid(), {number.value}); wait()")
    assert code == 128 + number
    assert said == f"stopped by {number.name} before the first round: there is nothing to save\n"


def test_a_process_that_waits_in_c_ends_too() -> None:
    # The main thread never gets to run a handler of Python.
    code, _ = run(
        "import ctypes, threading\n"
        "with signals.install():\n"
        " threading.Timer(0.1, os.kill, (os.getpid(), 15)).start()\n"
        " while True: ctypes.CDLL(None).sleep(3600)"
    )
    assert code == 143


def test_in_rounds_the_first_waits_and_the_second_ends_at_once() -> None:
    code, said = run(
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
    code, said = run(
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
    assert "; 2 of 3 jobs are saved, but not b; " in stop_sentence(15, 1, names, ["b"])
