"""Every moment of a process belongs to one phase."""

from __future__ import annotations

import threading

import pytest

from tlora_megatron import timeline
from tlora_megatron.timeline import PHASES, Timeline


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now_s = 100.0

        def sleep(self, seconds: float) -> None:
            self.now_s += seconds

    clock = Clock()
    monkeypatch.setattr(timeline, "boot_clock_s", lambda: clock.now_s)
    return clock


def test_phases_add_up_and_an_inner_one_takes_its_time_away(clock):
    line = Timeline(begin_s=90.0)
    clock.sleep(2)
    line.settle()
    clock.sleep(1)
    with line.phase("rounds"):
        clock.sleep(5)
        with line.phase("kernels"):
            clock.sleep(3)
        clock.sleep(1)
    seconds = line.seconds()
    assert {name: s for name, s in seconds.items() if s} == {
        "imports": 12.0,
        "rest": 1.0,
        "rounds": 6.0,
        "kernels": 3.0,
    }
    assert sum(seconds.values()) == clock.now_s - line.begin_s
    assert tuple(seconds) == PHASES


def test_a_phase_ends_when_it_raises(clock):
    line = Timeline(begin_s=clock.now_s, first="rest")

    def save() -> None:
        clock.sleep(4)
        raise OSError("full")

    with pytest.raises(OSError, match="full"), line.phase("saving"):
        save()
    clock.sleep(1)
    assert line.seconds()["saving"] == 4.0
    assert line.seconds()["rest"] == 1.0


def test_other_threads_are_not_counted(clock):
    line = Timeline(begin_s=clock.now_s, first="rest")

    def other() -> None:
        with line.phase("saving"):
            clock.sleep(7)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert line.seconds()["saving"] == 0.0
    assert line.seconds()["rest"] == 7.0


def test_the_command_begins_before_this_process_was_asked(monkeypatch):
    begin_s = timeline.process_begin_s()
    assert 0 < begin_s <= timeline.boot_clock_s()
    monkeypatch.setenv(timeline.BEGIN_VARIABLE, "12.5")
    assert timeline.process_begin_s() == 12.5
