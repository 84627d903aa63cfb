"""One server, of vLLM or another kind: what it holds, who uses that, how much it has to do."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tlora_megatron.files import read_object
from tlora_megatron.runtime.sampling.values import AdapterKey
from tlora_megatron.service.sampling.sampler import (
    SamplerBusy,
    SamplerUnavailable,
    SamplingRefused,
)
from tlora_megatron.service.sampling.vllm_server import Server, end_server

if TYPE_CHECKING:
    from tlora_megatron.service.sampling.vllm_probe import Probe

_PATIENT = httpx.Timeout(None, connect=5.0)
_QUICK = httpx.Timeout(60.0, connect=5.0)
_REST_S, _MOST_REST_S = 0.2, 5.0
"""Before a server that has gone is asked again; twice as long after each time."""
_MOVE = 16
"""Sequences that a server without an adapter must have fewer to be asked for it."""
PREFIX = "lora-"
"""Begins the names of adapters."""


class ServerGone(Exception):
    """A server does not answer, or has forgotten an adapter: it can be asked again, or another."""

    was_there = True
    """False if it has not taken the request."""


class _Missing(SamplingRefused):
    """The server knows no such model."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter's files under a name of their own: vLLM never gets others by it."""

    name: str
    folder: str

    @classmethod
    def of(cls, folder: str) -> NamedAdapter:
        """Looks at a folder; raises `SamplingRefused` if it holds no adapter of PEFT's."""
        try:
            key = AdapterKey.of(folder)
        except ValueError as error:
            raise SamplingRefused(str(error)) from error
        if key.is_checkpoint:
            raise SamplingRefused(
                f"adapter must be what PEFT loads for vLLM, got the checkpoint {folder}; wait for "
                f"the job's end, or serve with --sampler own"
            )
        return cls(PREFIX + hashlib.sha256(repr(key).encode()).hexdigest()[:24], folder)

    def describe(self) -> tuple[int, str]:
        """Its largest rank, 0 if that is not known, and a clause with it and its targets."""
        try:
            found = read_object(Path(self.folder) / "adapter_config.json") or {}
        except ValueError:
            return 0, "a configuration that cannot be read"
        rank = max([found.get("r", 0), *found.get("rank_pattern", {}).values()])
        return rank, f"rank {rank} on {', '.join(sorted(found.get('target_modules', ())))}"


@dataclass(slots=True)
class _Place:
    is_held: bool = False
    leases: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Door:
    """A server, asked over HTTP; all calls may be repeated.

    Args:
        slots: adapters at most that are in use at a time.
        most_rank: of an adapter; None = the server's limit is not known.
    """

    kind = "vLLM"
    load_path, unload_path = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    is_loaded, is_missing = "has already been loaded", "does not exist"
    """Words of its refusals."""

    def __init__(self, server: Server, *, slots: int, most_rank: int | None) -> None:
        self.server = server
        self.probe: Probe | None = None
        self.rest_until_s = 0.0
        """By the monotonic clock; it is not asked before."""
        self.is_warm = False
        """True once it has sampled with an adapter, since it was away."""
        self._slots = slots
        self._most_rank = most_rank
        self._rest_s = _REST_S
        self._num_open = 0
        self._places: dict[str, _Place] = {}
        """The least lately used first."""
        self._is_known = False
        self._meeting, self._turn = asyncio.Lock(), asyncio.Lock()
        self._freed = asyncio.Event()
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(
            base_url=server.address, headers=server.headers, timeout=_PATIENT, limits=limits
        )

    def cost(self, adapter: NamedAdapter | None) -> int:
        """Sequences that it has to do, more if it would have to load an adapter."""
        return self._num_open + (_MOVE if adapter and adapter.name not in self._places else 0)

    @asynccontextmanager
    async def lease(
        self, adapter: NamedAdapter | None, num_sequences: int
    ) -> AsyncIterator[str | None]:
        """Yields the name of an adapter that the server holds and does not drop meanwhile.

        Waits while as many others are in use as there are slots, in the order of the calls.

        Args:
            adapter: None = the base alone, which has no name here.
            num_sequences: that will be asked for.
        """
        place = None
        self._num_open += num_sequences
        try:
            await self._meet()
            if adapter is None:
                yield None
                return
            async with self._turn:
                place = await self._place(adapter.name)
                place.leases += 1
            async with place.lock:
                if not place.is_held:
                    await self.put(adapter)
                    place.is_held = True
            yield adapter.name
        finally:
            self._num_open -= num_sequences
            if place is not None:
                place.leases -= 1
                self._freed.set()

    async def _meet(self) -> None:
        """Asks a server that was never asked, or had gone, whether it is well and what it holds."""
        async with self._meeting:
            if self._is_known:
                return
            try:
                await self.ask("GET", "/health")
                held = await self.held()
            except ServerGone as error:
                error.was_there = False
                raise
            stay = {n: p for n, p in self._places.items() if p.leases or n in held}
            for known, place in stay.items():
                place.is_held = known in held
            # Those of a process before this one leave first.
            others = {n: _Place(is_held=True) for n in held if n not in stay}
            self._places = others | stay
            self._is_known = True

    async def _place(self, name: str) -> _Place:
        while name not in self._places and len(self._places) >= self._slots:
            gone = next((n for n, place in self._places.items() if not place.leases), None)
            if gone is None:
                self._freed.clear()
                await self._freed.wait()
                continue
            await self.drop(gone)
            self._places.pop(gone, None)
        place = self._places[name] = self._places.pop(name, _Place())
        return place

    async def held(self) -> frozenset[str]:
        """Names of our adapters that it knows."""
        return frozenset(name for name in await self.models() if name.startswith(PREFIX))

    def check_serves(self, base: str) -> None:
        """Does nothing: vLLM itself refuses a name that it does not have."""

    async def models(self) -> list[str]:
        """Names of its bases, and of all adapters that it knows."""
        return [str(one["id"]) for one in (await self.ask("GET", "/v1/models"))["data"]]

    async def put(self, adapter: NamedAdapter) -> None:
        """Loads an adapter; raises `SamplingRefused` for one that the server does not take."""
        rank, described = adapter.describe()
        if self._most_rank is not None and rank > self._most_rank:
            raise SamplingRefused(
                f"adapter must have at most rank {self._most_rank}, {self.kind}'s --max-lora-rank, "
                f"got {described}: give it with --sampler-words, or serve with --sampler own"
            )
        body = {"lora_name": adapter.name, "lora_path": adapter.folder}
        try:
            await self.ask("POST", self.load_path, body)
        except SamplingRefused as error:
            if self.is_loaded not in str(error):
                raise
        except ServerGone as error:
            if not error.was_there:
                raise
            await self._meet()  # it did not die of it
            self.rest_until_s = 0.0
            sentence = f"adapter must be one that {self.kind} takes, got {described}: {error}"
            raise SamplingRefused(sentence) from error

    async def drop(self, name: str) -> None:
        """Lets it forget an adapter."""
        with suppress(SamplingRefused):  # it has no such adapter
            await self.ask("POST", self.unload_path, {"lora_name": name})

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer, as JSON if it is."""
        timeout = _QUICK if body is None else _PATIENT
        with self._going():
            answer = await self._client.request(method, path, json=body, timeout=timeout)
            self._check(answer)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.json() if is_json else answer.text

    async def told(self, path: str) -> Mapping[str, Any]:
        """What it tells of itself; nothing where it does not."""
        with suppress(SamplingRefused):
            found = await self.ask("GET", path)
            return found if isinstance(found, dict) else {}
        return {}

    async def answers(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Yields the answer to a request that names a model, or the events of its stream."""
        try:
            if not body.get("stream"):
                yield await self.ask("POST", path, body)
                return
            with self._going():
                async with self._client.stream("POST", path, json=body) as answer:
                    if not answer.is_success:
                        await answer.aread()
                    self._check(answer)
                    async for line in answer.aiter_lines():
                        event = line.removeprefix("data: ")
                        if line == event or event == "[DONE]":
                            continue
                        if "error" in (found := json.loads(event)):
                            raise self._gone(f"it gave up: {found['error']}")
                        yield found
        except _Missing as error:
            if not {body.get("model"), *body.get("lora_path", ())} & self._places.keys():
                raise
            self._is_known = False
            what = f"{self.kind} at {self.server.address} has forgotten an adapter: {error}"
            raise ServerGone(what) from error

    @contextmanager
    def _going(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            missed = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise self._gone(str(error) or repr(error), was_there=not missed) from error
        self._rest_s = _REST_S

    def _gone(self, what: str, *, was_there: bool = True) -> ServerGone:
        self._is_known = self.is_warm = False
        self.rest_until_s = time.monotonic() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _MOST_REST_S)
        error = ServerGone(f"{self.kind} at {self.server.address}: {what}")
        error.was_there = was_there
        return error

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        try:
            body = answer.json()
            message = str(body.get("error", body).get("message", body))
        except (ValueError, AttributeError):
            message = answer.text[:500]
        if answer.status_code == 404 or (answer.status_code == 400 and self.is_missing in message):
            raise _Missing(message)
        if answer.status_code in (400, 422):
            raise SamplingRefused(message)
        if answer.status_code == 429:
            raise SamplerBusy("the sampler has too much to do: try again soon")
        if answer.status_code < 500:
            raise SamplerUnavailable(f"{self.kind} answered {answer.status_code}: {message}")
        raise self._gone(f"it answered {answer.status_code}: {message}")

    async def close(self) -> None:
        """Ends the server if it was started here."""
        await self._client.aclose()
        await end_server(self.server)
