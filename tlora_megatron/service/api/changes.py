"""Changes of many requests at once, in one transaction: a disk flushes once for all of them."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tlora_megatron.service.store import Store, StoreBusy, StoreFull, StoreUnreachable

T = TypeVar("T")
_MOST = 64
"""Changes of a transaction: the controller waits for it."""
_BROKEN = (StoreFull, StoreBusy, StoreUnreachable)
"""After these nothing of a transaction is kept."""


@dataclass(slots=True)
class _Change:
    call: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    value: Any = None
    error: BaseException | None = None


class Changes:
    """Makes changes in a thread of its own, those that wait together in one transaction.

    A change that the store refuses leaves the others of its transaction as they are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None

    async def make(self, call: Callable[[], T]) -> T:
        """Makes a change of the store and returns its result; it is on the disk then."""
        change = _Change(call)
        with self._guard:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="changes", daemon=True)
                self._thread.start()
            self._waiting.put(change)
        found: T = await asyncio.wrap_future(change.future)
        return found

    def close(self) -> None:
        """Ends the thread after what waits."""
        with self._guard:
            if self._thread is not None:
                self._waiting.put(None)
                self._thread.join()
                self._thread = None

    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < _MOST and not self._waiting.empty():
                batch.append(self._waiting.get())
            found = [change for change in batch if change is not None]
            # Whoever asked may have gone away; what has begun is carried out all the same.
            self._make([change for change in found if change.future.set_running_or_notify_cancel()])
            if None in batch:
                return

    def _make(self, batch: list[_Change]) -> None:
        broken: BaseException | None = None
        try:
            with self._store.transaction():
                for change in batch:
                    self._try(change)
                    if isinstance(change.error, _BROKEN):
                        broken = change.error
                        raise broken
        except BaseException as error:
            broken = broken or error
        for change in batch:
            # One that refused by itself would have done so alone, too.
            if broken is not None and change.error is None:
                change.error = broken
            if change.error is not None:
                change.future.set_exception(change.error)
            else:
                change.future.set_result(change.value)

    def _try(self, change: _Change) -> None:
        try:
            with self._store.part():
                change.value = change.call()
        except Exception as error:
            change.error = error
