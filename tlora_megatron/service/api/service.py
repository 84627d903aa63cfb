"""What all routers of a service share: folder, store, bases, callers, changes in groups, quotas."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from fastapi.concurrency import run_in_threadpool

from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.config.sections import plain
from tlora_megatron.service.api.gate import Gate
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.submission import base_key
from tlora_megatron.service.sampling.sampler import Sampler
from tlora_megatron.service.settings import KEEP_SESSIONS_S, read_bases
from tlora_megatron.service.store import OverLimit, Store, StoreBusy, StoreFull, StoreUnreachable

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
    """Makes changes in a thread, those that wait together in one transaction."""

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
                    try:
                        with self._store.part():
                            change.value = change.call()
                    except Exception as error:
                        change.error = error
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


STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_ALIVE_S = 15.0
"""A stream without news says that it lives so often."""


async def happens(event: asyncio.Event) -> bool:
    """Waits for an event; False if a stream that waits for it must give a sign of life first."""
    try:
        async with asyncio.timeout(_ALIVE_S):
            await event.wait()
    except TimeoutError:
        return False
    return True


MEASURED_S = 15.0
"""What APIs keep is measured anew after so long; between, what is written is added."""


class Quota:
    """Holds tenants to the bytes that they may have; may be used by several threads."""

    def __init__(self, store: Store, home: Home) -> None:
        self._store, self._home = store, home
        self._measures: list[Callable[[str], int]] = []
        self._guard = threading.Lock()
        self._known: dict[str, tuple[float, int]] = {}

    def add_measure(self, measure: Callable[[str], int]) -> None:
        """Counts what an API keeps for a tenant beside its uploads, in bytes."""
        self._measures.append(measure)

    def beside_uploads(self, tenant: str, *, fresh: bool = False) -> int:
        """Bytes that APIs keep for a tenant; unless `fresh`, they may be `MEASURED_S` old."""
        with self._guard:
            measured_s, size = self._known.get(tenant, (float("-inf"), 0))
        if not fresh and time.monotonic() < measured_s + MEASURED_S:
            return size
        now_s = time.monotonic()
        size = sum(measure(tenant) for measure in self._measures)
        with self._guard:
            self._known[tenant] = now_s, size
        return size

    def check_disk(self, tenant: str) -> None:
        """Refuses more where a tenant has as many bytes on the disk as it may (`OverLimit`)."""
        most = self._store.tenants.limits(tenant).disk_bytes
        if most is None:
            return
        sizes = (self._home.job_bytes(job.id) for job in self._store.jobs.each(tenant=tenant))
        held = self._store.uploads.bytes_of(tenant) + sum(sum(size.values()) for size in sizes)
        if held >= most:
            raise OverLimit(
                f"the files and jobs of a tenant must have less than {most:,} bytes on the disk, "
                f"got {held:,}: remove jobs that have ended, or their checkpoints (`tlora rm`)"
            )

    def check(self, tenant: str, size: int) -> None:
        """Refuses bytes for which a tenant has no room (`OverLimit`)."""
        most = self._store.tenants.limits(tenant).upload_bytes
        uploads = self._store.uploads.bytes_of(tenant)
        if uploads + self.beside_uploads(tenant) + size <= most:
            return
        held = uploads + self.beside_uploads(tenant, fresh=True)  # a checkpoint may have made room
        if held + size > most:
            raise OverLimit(
                f"the files and requests of a tenant must have at most {most:,} bytes together, "
                f"got {held:,} and {size:,} more: checkpoints and a day's time free requests"
            )

    def note(self, tenant: str, size: int) -> None:
        """Counts bytes that were written just now."""
        with self._guard:
            measured_s, known = self._known.get(tenant, (float("-inf"), 0))
            self._known[tenant] = measured_s, known + size


P = ParamSpec("P")
Closer = Callable[[], Awaitable[None]]
_KNOWN_S = 1.0
"""A controller gives a sign of life every three seconds."""


@dataclass(slots=True)
class Service:
    """A service as its routers see it. It holds nothing that a restart would lose."""

    home: Home
    store: Store
    gate: Gate
    changes: Changes
    sampler: Sampler | None = None
    """None: this service generates nothing."""
    keep_sessions_s: float = KEEP_SESSIONS_S
    """Sessions of Tinker's clients are kept so long after their end."""
    openers: list[Closer] = field(default_factory=list)
    """Called in turn when the app starts."""
    closers: list[Closer] = field(default_factory=list)
    """Called in turn, the last one first, when the app ends."""
    quota: Quota = field(init=False)
    _served: tuple[float, bool] = (float("-inf"), False)

    def __post_init__(self) -> None:
        self.quota = Quota(self.store, self.home)

    @classmethod
    def of(cls, home: Home, store: Store, **settings: Any) -> Service:
        return cls(home, store, Gate(store), Changes(store), **settings)

    @property
    def is_served(self) -> bool:
        """True while a controller gives signs of life; known for a second."""
        known_s, is_served = self._served
        if time.monotonic() > known_s:
            is_served = self.store.lock.is_held()
            self._served = (time.monotonic() + _KNOWN_S, is_served)
        return is_served

    def bases(self) -> dict[str, BaseModelSpec]:
        """The bases that jobs may name."""
        return read_bases(self.home)

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Makes a call that reads the store or a disk, beside the event loop."""
        return await run_in_threadpool(call, *args, **kwargs)

    async def change(self, call: Callable[[], T]) -> T:
        """Makes a quick change of the store alone; returns its result when it is on the disk."""
        return await self.changes.make(call)

    def base_names(self) -> dict[str, str]:
        """Names of the bases that jobs may name, by the keys that rows of jobs have for them."""
        return {base_key(plain(spec)): name for name, spec in self.bases().items()}

    def outward(self, text: str, tenant: str) -> str:
        """A sentence for a tenant: paths of the service's host are not its business."""
        for name, base in self.bases().items():
            text = text.replace(str(base.folder), name)
        text = text.replace(f"{self.home.tenant(tenant)}/files/", "")
        text = text.replace(f"{self.home.tenant(tenant)}/", "")
        return text.replace(f"{self.home.root}/", "")

    async def open(self) -> None:
        """Starts what routers do beside requests."""
        for start in self.openers:
            await start()

    async def close(self) -> None:
        while self.closers:
            await self.closers.pop()()
        await run_in_threadpool(self.changes.close)
