"""One thread that carries out what a run has to write, in the order in which it comes."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WriterDied(RuntimeError):
    """The thread ended of an error that no single file is to blame for."""


class Writer:
    """Runs tasks on a thread of its own, one after another.

    A task deals with the errors that it expects. Any other ends the thread, and every call from
    then on raises `WriterDied`. The thread does not keep a process alive; at its regular exit what
    was submitted is still carried out.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held by whoever changes what others wait for; its waiters look anew at every task's end.
        """
        self._tasks: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], None]) -> None:
        """Has a task carried out behind those that were submitted before."""
        with self.changed:
            self._check()
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tlora-writer", daemon=True)
                self._thread.start()
                atexit.register(self._drain_at_exit)
            self.changed.notify_all()

    def wait(self, ready: Callable[[], T | None]) -> T:
        """Waits until `ready`, which is called with the lock held, returns something but None."""
        with self.changed:
            while (found := ready()) is None:
                self._check()
                self.changed.wait()
            return found

    def drain(self) -> None:
        """Waits until every task is done."""
        self.wait(lambda: None if self._is_busy or self._tasks else True)
        self._check()

    def close(self) -> None:
        """Carries out what was submitted and ends the thread; a second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self._drain_at_exit)
        self.drain()
        with self.changed:
            self._tasks.append(_end)
            self.changed.notify_all()
        thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise WriterDied(f"the writer of checkpoints has ended: {self._error}") from self._error

    def _work(self) -> None:
        try:
            while (task := self._next()) is not _end:
                task()
                del task  # or the job that it wrote would stay in memory until the next one comes
        except BaseException as error:
            self._error = error
        finally:
            with self.changed:
                self._is_busy = False
                self.changed.notify_all()

    def _next(self) -> Callable[[], None]:
        with self.changed:
            self._is_busy = False
            self.changed.notify_all()
            while not self._tasks:
                self.changed.wait()
            self._is_busy = True
            return self._tasks.popleft()

    def _drain_at_exit(self) -> None:
        try:
            self.drain()
        except WriterDied as error:
            logger.error("%s", error)


def _end() -> None:
    """The task that ends the thread."""
