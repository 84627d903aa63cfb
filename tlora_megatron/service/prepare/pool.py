"""Processes that validate submitted jobs, beside a controller that never waits for them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

from tlora_megatron.service.prepare.submission import (
    Outcome,
    PrepareRules,
    Refused,
    Submission,
    Validated,
)
from tlora_megatron.service.supervisor import Child, package_path

COMMAND = [sys.executable, "-m", "tlora_megatron.service.prepare.worker"]
_LEAVE_S = 1.0
"""For a process that has closed its answers to be gone by itself: how it ended says why."""


@dataclass(frozen=True, slots=True)
class _Request:
    job: str
    submission: Submission


class PreparePool(AbstractContextManager["PreparePool"]):
    """Validates jobs in processes of their own; every call returns at once.

    A process that dies takes down the one job that it was reading; so does one that takes
    `limit_s`. Each of the `workers` holds about half a gigabyte of memory.
    """

    def __init__(self, rules: PrepareRules, *, workers: int = 1, limit_s: float = 3600.0) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._rules, self._limit_s = rules, limit_s
        self._most = workers
        self._workers: list[_Worker] = []
        self._waiting: deque[_Request] = deque()

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm(self) -> None:
        """Starts a process before there is work: the first job then waits for no imports."""
        if not self._workers:
            self._workers.append(_Worker())

    def submit(self, job_id: str, submission: Submission) -> None:
        """Takes a job; `poll` gives its outcome some time later."""
        self._waiting.append(_Request(job_id, submission))
        self._hand_out()

    def forget(self, job_id: str) -> None:
        """Gives a job up: `poll` will not speak of it."""
        self._waiting = deque(request for request in self._waiting if request.job != job_id)
        for worker in [w for w in self._workers if w.request and w.request.job == job_id]:
            self._end(worker)
        self._hand_out()

    def poll(self) -> list[Outcome]:
        """Outcomes since the last call."""
        found: list[Outcome] = []
        for worker in list(self._workers):
            request = worker.request
            outcome = worker.answer()
            if outcome is not None:
                found.append(outcome)
            elif worker.is_over:
                code = worker.child.end(_LEAVE_S)
                self._end(worker)
                if request is not None:
                    found.append(_died(request, code))
            elif request is not None and worker.busy_s > self._limit_s:
                self._end(worker)
                sentence = f"job {request.submission.name!r} could not be checked within "
                found.append(Refused(job=request.job, error=f"{sentence}{self._limit_s:.0f} s"))
        self._hand_out()
        return found

    def waitables(self) -> list[int]:
        """Descriptors for `select`: readable when `poll` has something to tell."""
        return [worker.child.pipe.fileno() for worker in self._workers]

    def close(self) -> None:
        """Ends all processes; jobs under way are forgotten."""
        self._waiting.clear()
        for worker in list(self._workers):
            self._end(worker)

    def _hand_out(self) -> None:
        while self._waiting:
            free = next((w for w in self._workers if w.request is None and not w.is_over), None)
            if free is None:
                if len(self._workers) >= self._most:
                    return
                free = _Worker()
                self._workers.append(free)
            if not free.take(self._waiting[0], self._rules):
                self._end(free)  # it has died while it was idle
                continue
            self._waiting.popleft()

    def _end(self, worker: _Worker) -> None:
        worker.child.kill()
        self._workers.remove(worker)


class _Worker:
    """One process, and the job it reads."""

    def __init__(self) -> None:
        # Reading needs no GPU; a context on one would take its memory from gangs.
        own = {"PYTHONPATH": package_path(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self.child = Child(COMMAND, environment=os.environ | own, wire="lines")
        self._since_s = 0.0
        self.request: _Request | None = None

    @property
    def is_over(self) -> bool:
        """True once it has closed its answers: it is dead, or as good as."""
        return self.child.pipe.is_over

    @property
    def busy_s(self) -> float:
        return time.monotonic() - self._since_s

    def take(self, request: _Request, rules: PrepareRules) -> bool:
        """Gives it a job; False if it cannot be reached."""
        body = {
            "job": request.job,
            "submission": asdict(request.submission),
            "rules": asdict(rules),
        }
        if not self.child.pipe.send(body):
            return False
        self.request, self._since_s = request, time.monotonic()
        return True

    def answer(self) -> Outcome | None:
        """The outcome of its job, if it has given one."""
        answers = self.child.pipe.receive()
        if not answers:
            return None
        self.request = None
        if "refused" in answers[0]:
            return Refused(**answers[0]["refused"])
        return Validated(**answers[0]["validated"])


def _died(request: _Request, exit_code: int) -> Refused:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        how = f"was ended by {name}" + (
            ", as when the host's memory is full" if exit_code == -signal.SIGKILL else ""
        )
    else:
        how = f"ended with code {exit_code}"
    return Refused(
        job=request.job,
        error=f"job {request.submission.name!r} could not be checked: the process that read it "
        f"{how}; submit it again",
    )
