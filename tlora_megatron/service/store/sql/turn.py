"""Turns of writers of one file: they wait in the kernel, not by trying again and again."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

Turn = Callable[[], AbstractContextManager[None]]


def turns_at(path: Path, wait_s: float) -> Turn:
    """Turns that the threads and processes of a host take at a file.

    A turn ends with its process, however that ends. One that does not come in time is not waited
    for any longer: whoever needs more than courtesy needs a lock besides.

    Args:
        path: The file, which is made; its content does not matter.
        wait_s: Longest wait for a turn.
    """

    @contextmanager
    def turn() -> Iterator[None]:
        # Opened for each turn: threads that share an open file would share its lock.
        file = _File(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        try:
            file.lock(wait_s)
            yield
        finally:
            file.close()

    return turn


class _File:
    """An open file with a lock that can be waited for with a limit, which flock has not."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waits = False
        self._is_over = False
        self._guard = threading.Lock()

    def lock(self, wait_s: float) -> None:
        """Locks the file, or gives up when the time is over."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._waits = True
            waiter = threading.Thread(target=self._wait, daemon=True)
            waiter.start()
            waiter.join(wait_s)

    def close(self) -> None:
        """Ends the turn; a thread that still waits for the lock closes the file when it is done."""
        with self._guard:
            self._is_over = True
            if not self._waits:
                os.close(self._descriptor)

    def _wait(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        finally:
            with self._guard:
                self._waits = False
                if self._is_over:
                    os.close(self._descriptor)
