"""The pool's processes, with a stub's work: it is handed out, and a death takes down one job."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator

import pytest

from tests.helpers.launch import HANG_S
from tlora_megatron.service.prepare import pool as pool_module
from tlora_megatron.service.prepare.pool import PreparePool
from tlora_megatron.service.prepare.submission import Outcome, PrepareRules, Submission

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
    with PreparePool(PrepareRules(root="/r")) as made:
        yield made
    assert made.waitables() == []


def _submission(name: str) -> Submission:
    return Submission(name=name, base_model={}, document={})


def _outcomes(pool: PreparePool, count: int) -> list[Outcome]:
    found: list[Outcome] = []
    end = time.monotonic() + HANG_S
    while len(found) < count and time.monotonic() < end:
        select.select(pool.waitables(), [], [], 1.0)
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
        ("kill", r"was ended by SIGKILL, as when the host's memory is full; submit it again"),
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


def test_a_death_between_two_jobs_harms_none(pool: PreparePool) -> None:
    pool.submit("j1", _submission("good"))
    (first,) = _outcomes(pool, 1)
    os.kill(int(first.error.split()[-1]), 9)  # type: ignore[union-attr]
    while not select.select(pool.waitables(), [], [], HANG_S)[0]:
        pass
    pool.submit("j2", _submission("good"))
    (second,) = _outcomes(pool, 1)
    assert second.job == "j2"


def test_what_is_forgotten_is_ended_and_not_told(pool: PreparePool) -> None:
    for job, what in (("j1", "sleep"), ("j2", "sleep"), ("j3", "good")):
        pool.submit(job, _submission(what))
    pool.forget("j2")
    pool.forget("j1")
    (outcome,) = _outcomes(pool, 1)
    assert outcome.job == "j3"


def test_a_job_that_takes_too_long_is_given_up(stub: None) -> None:
    with PreparePool(PrepareRules(root="/r"), limit_s=0.0) as pool:
        pool.submit("j1", _submission("sleep"))
        (outcome,) = pool.poll()
        assert pool.waitables() == []
    assert "could not be checked within 0 s" in outcome.error  # type: ignore[union-attr]
