"""Processes that validate submitted jobs, beside a controller that never waits for them."""

from __future__ import annotations

import os
import signal
import sys
import time
from bisect import insort
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass

from tlora_megatron.config.job import files_in
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


_LARGE_BYTES = 4 << 20
"""Data of a job that take minutes to read, and must not keep all processes from others."""
_KILLS = 3
"""Processes that were killed while they read a job, after which it is refused."""


@dataclass(kw_only=True, slots=True)
class _Request:
    job: str
    submission: Submission
    priority: int
    number: int
    is_large: bool
    kills: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Those of high priority come first, then those that came first."""
        return -self.priority, self.number


class PreparePool(AbstractContextManager["PreparePool"]):
    """Validates jobs in processes of their own; every call returns at once.

    Jobs with large files never take the last process where there are several. A job whose process
    is killed is read again; one that ends its process, or takes `limit_s`, is refused, and no other
    with it. Each of the `workers` holds about half a gigabyte of memory, from when it is needed.
    """

    def __init__(self, rules: PrepareRules, *, workers: int = 2, limit_s: float = 3600.0) -> None:
        self._rules, self._limit_s = rules, limit_s
        self._most = workers
        self._workers: list[_Worker] = []
        self._waiting: list[_Request] = []
        self._count = 0

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm(self) -> None:
        """Starts a process before there is work: the first job then waits for no imports."""
        if not self._workers:
            self._workers.append(_Worker())

    def submit(self, job_id: str, submission: Submission, priority: int = 0) -> None:
        """Takes a job; `poll` gives its outcome some time later."""
        self._count += 1
        request = _Request(
            job=job_id,
            submission=submission,
            priority=priority,
            number=self._count,
            is_large=_data_bytes(submission) > _LARGE_BYTES,
        )
        insort(self._waiting, request, key=lambda one: one.order)
        self._hand_out()

    def forget(self, jobs: Collection[str]) -> None:
        """Gives jobs up: `poll` will not speak of them, and has others read in their place."""
        self._waiting = [request for request in self._waiting if request.job not in jobs]
        for worker in [w for w in self._workers if w.request and w.request.job in jobs]:
            self._end(worker)

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
                    request.kills += code < 0
                    if 0 < request.kills < _KILLS:
                        insort(self._waiting, request, key=lambda one: one.order)
                    else:
                        found.append(_died(request, code))
            elif request is not None and time.monotonic() > worker.since_s + self._limit_s:
                self._end(worker)
                sentence = f"job {request.submission.name!r} could not be checked within "
                found.append(Refused(job=request.job, error=f"{sentence}{self._limit_s:.0f} s"))
        self._hand_out()
        return found

    def close(self) -> None:
        """Ends all processes; jobs under way are forgotten."""
        self._waiting.clear()
        for worker in list(self._workers):
            self._end(worker)

    def _hand_out(self) -> None:
        while (request := self._next()) is not None:
            free = next((w for w in self._workers if w.request is None and not w.is_over), None)
            if free is None:
                if len(self._workers) >= self._most:
                    return
                free = _Worker()
                self._workers.append(free)
            if not free.take(request, self._rules):
                self._end(free)  # it has died while it was idle
                continue
            self._waiting.remove(request)

    def _next(self) -> _Request | None:
        """The request that comes next; large ones leave one process to the others."""
        reading = sum(
            worker.request is not None and worker.request.is_large for worker in self._workers
        )
        may_be_large = reading < max(1, self._most - 1)
        return next((one for one in self._waiting if may_be_large or not one.is_large), None)

    def _end(self, worker: _Worker) -> None:
        worker.child.kill()
        self._workers.remove(worker)


class _Worker:
    """One process, and the job it reads."""

    def __init__(self) -> None:
        # Reading needs no GPU; a context on one would take its memory from gangs.
        own = {"PYTHONPATH": package_path(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self.child = Child(COMMAND, environment=os.environ | own, wire="lines")
        self.since_s = 0.0
        self.request: _Request | None = None

    @property
    def is_over(self) -> bool:
        """True once it has closed its answers: it is dead, or as good as."""
        return self.child.pipe.is_over

    def take(self, request: _Request, rules: PrepareRules) -> bool:
        """Gives it a job; False if it cannot be reached."""
        body = {
            "job": request.job,
            "submission": asdict(request.submission),
            "rules": asdict(rules),
        }
        if not self.child.pipe.send(body):
            return False
        self.request, self.since_s = request, time.monotonic()
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


def _data_bytes(submission: Submission) -> int:
    """The size of a job's files, as far as they are there."""
    total, data = 0, dict(submission.document.get("data") or {})
    for path in (*files_in(data.get("train")), *files_in(data.get("eval"))):
        with suppress(OSError):
            total += os.stat(path).st_size
    return total


def _died(request: _Request, exit_code: int) -> Refused:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        how = f"was ended by {name} {request.kills} times" + (
            ", as when the host's memory is full" if exit_code == -signal.SIGKILL else ""
        )
    else:
        how = f"ended with code {exit_code}"
    return Refused(
        job=request.job,
        error=f"job {request.submission.name!r} could not be checked: the process that read it "
        f"{how}; submit it again",
    )
