"""Processes of a service: how they are started and ended, and started again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.launch import HANG_S
from tlora_megatron.service.supervisor import Child, KeptAlive

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


def test_child_that_dies_is_started_again_until_the_end() -> None:
    codes: list[int] = []
    again = threading.Event()

    def start() -> Child:
        if codes:
            again.set()
        return Child(python("import sys; sys.stdin.read()"), wire="stdin")

    with KeptAlive(start, codes.append) as kept:
        while kept.child is None:
            again.wait(0.01)
        first = kept.child
        first.handle.kill()
        assert again.wait(HANG_S)
        while kept.child is first:
            again.wait(0.0)
        second = kept.child
    assert codes == [-signal.SIGKILL]
    assert second.exit_code == 0
