"""A run that stands still ends, and says which ranks do not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.helpers.launch import HANG_S
from tlora_megatron.training import run_watch
from tlora_megatron.training.run_watch import Beat, HangWatch
from tlora_megatron.training.signals import StopSignals

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
        self.store.set("1", beat.line())

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


def test_a_signal_does_not_wait_for_a_rank_that_has_died(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(run_watch, "_FIRST_ROUNDS", 1)  # there is patience for 600 s
    with run.watch.watching():
        run.watch.tick("round 4")
        assert not run.has_ended.wait(2 * LIMIT_S)
        run.signals._counter.count(15)
        assert run.has_ended.wait(HANG_S)
    assert run.reason.startswith("the run cannot stop behind its round, in round 4: rank 1 on")


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


def test_a_beat_is_read_as_it_is_written() -> None:
    beat = Beat(12, 3.25, "node-7.cluster", "round 412")
    assert Beat.read(beat.line().encode()) == beat
