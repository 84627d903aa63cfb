"""Every moment of a process belongs to one phase."""

from __future__ import annotations

import os
import sys
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


@pytest.fixture
def fresh(clock, monkeypatch):
    """The timeline of a process that has not begun a run, and its clock."""
    monkeypatch.setattr(timeline, "_process", Timeline(begin_s=90.0))
    monkeypatch.setattr(timeline, "_has_begun_run", False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    return clock


def test_a_first_run_began_with_its_process_and_a_further_one_begins_anew(fresh):
    timeline.begin_run()
    fresh.sleep(3)
    assert timeline.process_timeline().begin_s == 90.0
    assert timeline.process_timeline().seconds() == dict.fromkeys(PHASES, 0.0) | {
        "imports": 10.0,
        "rest": 3.0,
    }
    timeline.begin_run()
    fresh.sleep(1)
    assert timeline.process_timeline().begin_s == 103.0
    assert timeline.process_timeline().seconds() == dict.fromkeys(PHASES, 0.0) | {"rest": 1.0}


def test_a_run_that_is_started_at_a_prompt_begins_there(fresh, monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    timeline.begin_run()
    assert timeline.process_timeline().begin_s == 100.0


def test_the_line_names_every_phase_and_what_ran_beside():
    times = dict.fromkeys(PHASES, 0.0) | {"rounds": 110.25, "imports": 6.0}
    assert timeline.time_line({"time_s": times, "saving": {"writer_s": 15.5, "drain_s": 3.5}}) == (
        "116 s = imports 6, kernels 0, base 0, data 0, rounds 110, evaluation 0, saving 0, "
        "export 0, rest 0; 12 s of saving ran beside the rounds"
    )
    assert timeline.time_line({"time_s": {"rounds": 1.26, "rest": 0.5}}) == (
        "1.8 s = rounds 1.3, rest 0.5"
    )
    assert timeline.time_line({}) == ""


def test_ranks_of_torchrun_began_with_it_unless_it_may_have_restarted_them(monkeypatch):
    monkeypatch.delenv(timeline.BEGIN_VARIABLE, raising=False)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert timeline.process_begin_s() == timeline._begin_s(str(os.getppid()))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert timeline.process_begin_s() == timeline._begin_s("self")


def test_the_command_begins_before_this_process_was_asked(monkeypatch):
    begin_s = timeline.process_begin_s()
    assert 0 < begin_s <= timeline.boot_clock_s()
    monkeypatch.setenv(timeline.BEGIN_VARIABLE, "12.5")
    assert timeline.process_begin_s() == 12.5
