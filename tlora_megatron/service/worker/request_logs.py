"""The request logs of the jobs that a gang trains, as its loop asks for them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tlora_megatron.service.home import Home
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.training.driven.requests import Answer, Request

logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0
"""A file that the first rank has seen may take so long to be seen on another host."""
_LOOK_S = 0.01


class _Task(NamedTuple):
    job: str
    run: Callable[[], None]


class RequestLogs:
    """The requests that wait in jobs' folders; `training.driven.clients.Clients`.

    Answers are written by a thread, in their order: the disk keeps nobody waiting.

    Args:
        may_write: asked by a job's name before anything in its folder changes.
    """

    def __init__(self, root: Path, may_write: Callable[[str], bool]) -> None:
        self._home = Home(root)
        self._may_write = may_write
        self._logs: dict[str, RequestLog] = {}
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._open = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def has_request(self, job: str, number: int) -> bool:
        """True if the request is there."""
        return self._of(job).has_request(number)

    def is_answered(self, job: str, number: int) -> bool:
        """True if it was answered."""
        return self._of(job).has_answer(number)

    def read(self, job: str, number: int) -> Request:
        """Reads a request that the first rank has seen.

        Raises:
            RequestError: if it is damaged.
            OSError: if it cannot be read for long: this rank then ends, and the gang with it.
        """
        end_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._of(job).read_request(number)
            except OSError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(_LOOK_S)

    def answer(self, job: str, number: int, answer: Answer) -> None:
        """Has a request answered, unless it was before. Does not wait."""

        def write() -> None:
            if not self._of(job).has_answer(number):
                self._of(job).write_answer(number, answer)

        self._submit(job, write)

    def covered(self, job: str, number: int) -> None:
        """Has requests removed that a checkpoint counts. Does not wait."""
        self._submit(job, lambda: self._of(job).prune(number))

    def flush(self, job: str | None) -> None:
        """Waits until everything so far is on the disk."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open)

    def state_folder(self, path: str) -> Path:
        """The folder of a state of any job of this service."""
        return self._home.root / path

    def _of(self, job: str) -> RequestLog:
        if job not in self._logs:
            self._logs[job] = RequestLog(self._home.job(job))
        return self._logs[job]

    def _submit(self, job: str, run: Callable[[], None]) -> None:
        with self._changed:
            self._open += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tlora-answers", daemon=True)
            self._thread.start()
        self._tasks.put(_Task(job, run))

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                self._carry_out(task)
            except Exception:
                logger.exception("an answer to the client of job %s is lost", task.job)
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _carry_out(self, task: _Task) -> None:
        """Tries for a while what the disk refuses; a job of somebody else is left alone."""
        end_s = time.monotonic() + _PATIENCE_S
        while self._may_write(task.job):
            try:
                task.run()
                return
            except OSError as error:
                if time.monotonic() > end_s:
                    raise
                logger.warning("job %s: an answer must wait: %s", task.job, error)
                time.sleep(1.0)
