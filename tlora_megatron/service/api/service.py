"""The values that all routers of the service share: folder, store, bases and callers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ParamSpec, TypeVar

from fastapi.concurrency import run_in_threadpool

from tlora_megatron.config.jobs import plain
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.service.api.changes import Changes
from tlora_megatron.service.api.gate import Gate
from tlora_megatron.service.api.quota import Quota
from tlora_megatron.service.bases import read_bases
from tlora_megatron.service.home import Home
from tlora_megatron.service.keeping import KEEP_SESSIONS_S
from tlora_megatron.service.prepare.submission import base_key
from tlora_megatron.service.sampling.sampler import InUse
from tlora_megatron.service.store import Store

P = ParamSpec("P")
T = TypeVar("T")
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
    sampler: Any = None
    """A `service.sampling.sampler.Sampler`; None: this service generates nothing."""
    keep_sessions_s: float = KEEP_SESSIONS_S
    """Sessions of Tinker's clients are kept so long after their end."""
    openers: list[Closer] = field(default_factory=list)
    """Called in turn when the app starts."""
    closers: list[Closer] = field(default_factory=list)
    """Called in turn, the last one first, when the app ends."""
    in_use: InUse = field(default_factory=InUse)
    quota: Quota = field(init=False)
    _served: tuple[float, bool] = (float("-inf"), False)

    def __post_init__(self) -> None:
        self.quota = Quota(self.store)

    @classmethod
    def of(cls, home: Home, store: Store, **settings: Any) -> Service:
        """The service of a folder."""
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
        """Makes a call that changes the store alone; returns its result when it is on the disk.

        Calls of several requests share a transaction, so a call must do nothing slow besides.
        """
        return await self.changes.make(call)

    def base_names(self) -> dict[str, str]:
        """Names of the bases that jobs may name, by the keys that rows of jobs have for them."""
        return {base_key(plain(asdict(spec))): name for name, spec in self.bases().items()}

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
        """Ends what routers have started."""
        while self.closers:
            await self.closers.pop()()
        await run_in_threadpool(self.changes.close)
