"""Samples by a process of ours: started when it is asked, asked in turn, replaced when it dies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tlora_megatron.channel import to_line
from tlora_megatron.runtime.sampling.values import (
    Answer,
    Piece,
    Prompt,
    SamplerLimits,
    gather,
)
from tlora_megatron.service.home import make_folder
from tlora_megatron.service.sampling.sampler import (
    Sampler,
    SamplerBusy,
    SamplerUnavailable,
    SamplingRefused,
)
from tlora_megatron.service.sampling.wire import LOOK_S, connect, piece_from_json, prompt_to_json
from tlora_megatron.service.supervisor import Child, last_words

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-W", "ignore", "-m", "tlora_megatron.service.sampling.process")
_DYING_S = 2.0
"""For a process that broke a connection off: if it lives then, it did not die of it."""
BaseOf = Callable[[str], Mapping[str, Any]]
"""From a base's name to its section `base_model`, the path absolute; raises KeyError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSettings:
    """How the processes are started."""

    gpu: str | None = None
    """as in CUDA_VISIBLE_DEVICES; None = the CPU"""
    idle_s: float = 300.0
    """without requests, after which a process ends and gives its memory back"""
    most_open: int = 1024
    """requests that a process has at once; more wait for their turn"""
    most_waiting: int = 4096
    """requests that wait for their turn; one more is refused"""
    limits: SamplerLimits = field(default_factory=SamplerLimits)
    command: tuple[str, ...] = COMMAND


async def _end(child: Child) -> None:
    """Ends a process that holds nothing worth keeping, and sees it off."""
    child.handle.kill()
    await child.ended()
    child.close()


async def _talk(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: Mapping[str, Any]
) -> AsyncGenerator[Mapping[str, Any], None]:
    """Yields the answers to a message; raises `SamplingRefused` or `ConnectionError`."""
    try:
        writer.write(to_line(message))
        await writer.drain()
        while line := await reader.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise SamplingRefused(answer["error"])
            yield answer
            if "piece" not in answer:
                return
        raise ConnectionResetError("it ended without a word")
    finally:
        writer.close()


class OwnSampler(Sampler):
    """A `Sampler` over processes that listen in a folder, whoever started them."""

    def __init__(
        self,
        folder: Path,
        base_of: BaseOf,
        settings: OwnSettings = OwnSettings(),
    ) -> None:
        self._folder = make_folder(folder)
        self._base_of = base_of
        self._settings = settings
        self._starting: dict[Path, asyncio.Task[None]] = {}
        self._children: dict[Path, Child] = {}
        self._turns: dict[Path, asyncio.Semaphore] = {}
        self._num_waiting = 0

    async def generate(self, base: str, prompts: Sequence[Prompt]) -> list[Answer]:
        return gather(prompts, [piece async for piece in self.stream(base, prompts, whole=True)])

    async def stream(
        self, base: str, prompts: Sequence[Prompt], *, whole: bool = False
    ) -> AsyncIterator[Piece]:
        """Yields pieces as tokens come, each once, if need be from another process.

        Args:
            whole: only when a sequence has ended, in one piece: a token costs the wire 1 ms.
        """
        message = {
            "op": "generate",
            "whole": whole,
            "prompts": [prompt_to_json(prompt) for prompt in prompts],
            "seed": secrets.randbits(62),
        }
        told: Counter[tuple[int, int, bool]] = Counter()
        again: Counter[tuple[int, int, bool]] = Counter()
        async with aclosing(self._ask(base, message, again)) as answers:
            async for answer in answers:
                if "piece" not in answer:
                    return
                piece = piece_from_json(answer["piece"])
                key = (piece.prompt, piece.sample, piece.scores is not None)
                again[key] += 1
                if again[key] > told[key]:
                    told[key] += 1
                    yield piece

    async def encode(
        self,
        base: str,
        text: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        said = {"text": text} if isinstance(text, str) else {"messages": text, "tools": tools}
        return (await self._ask_one(base, {"op": "encode", **said}))["tokens"]

    async def decode(self, base: str, tokens: Sequence[int]) -> str:
        return (await self._ask_one(base, {"op": "decode", "tokens": list(tokens)}))["text"]

    async def token_texts(self, base: str, tokens: Sequence[int]) -> list[str]:
        message = {"op": "decode", "tokens": list(tokens), "each": True}
        return (await self._ask_one(base, message))["texts"]

    def check_room(self) -> None:
        if self._num_waiting >= (most := self._settings.most_waiting):
            raise SamplerBusy(
                f"the sampler must have at most {most} requests waiting, got one more: try again "
                "soon"
            )

    async def close(self) -> None:
        """Ends the processes that were started here."""
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        for child in self._children.values():
            await _end(child)
        self._children.clear()

    async def _ask_one(self, base: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
        async with aclosing(self._ask(base, message, Counter())) as answers:
            async for answer in answers:
                return answer
        raise AssertionError("an answer or an error comes")

    async def _ask(
        self, base: str, message: Mapping[str, Any], again: Counter[Any]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yields the answers to a message, twice over if need be; `again` is emptied between."""
        async with self._turn(base):
            for is_last in (False, True):
                again.clear()
                reader, writer = await self._connect(base)
                child = self._children.get(self._socket(base))
                try:
                    async with aclosing(_talk(reader, writer, message)) as answers:
                        async for answer in answers:
                            yield answer
                    return
                except ConnectionError as error:
                    what = await self._what_broke(base, child)
                    if is_last:
                        raise SamplerUnavailable(what) from error
                    logger.warning("%s; the request is asked again", what)

    @asynccontextmanager
    async def _turn(self, base: str) -> AsyncIterator[None]:
        """Waits until a base's process may have one more request; refuses one too many."""
        self.check_room()
        most = self._settings.most_open
        turns = self._turns.setdefault(self._socket(base), asyncio.Semaphore(most))
        self._num_waiting += 1
        try:
            await turns.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            turns.release()

    async def _what_broke(self, base: str, child: Child | None) -> str:
        """Says why a connection was broken off: a process that lives is not to blame, and stays."""
        code = None
        if child is None:  # somebody else's: a dying one takes calls as long as its socket is open
            await asyncio.sleep(_DYING_S)
        else:
            with suppress(TimeoutError):
                code = await asyncio.wait_for(child.ended(), _DYING_S)
        if code is None:
            return f"the sampler of {base} broke a connection off"
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        words = last_words(self._log(self._socket(base)))
        return f"the sampler of {base} has ended {how}: {words or 'it said nothing'}"

    async def _connect(self, base: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        socket = self._socket(base)
        try:
            for _ in range(2):  # the process may end between its start and the call
                try:
                    return await connect(socket)
                except (ConnectionRefusedError, FileNotFoundError):
                    await self._start_once(socket, base)
            return await connect(socket)
        except OSError as error:
            raise SamplerUnavailable(f"the sampler of {base} takes no call: {error}") from error

    async def _start_once(self, socket: Path, base: str) -> None:
        """Starts a base's process; all that ask at once wait for the same start."""
        task = self._starting.get(socket)
        if task is None:
            task = asyncio.create_task(self._start(socket, base))
            self._starting[socket] = task
            task.add_done_callback(lambda _: self._starting.pop(socket, None))
        await asyncio.shield(task)

    async def _start(self, socket: Path, base: str) -> None:
        settings = self._settings
        order = {
            "base": self._base(base),
            "socket": str(socket),
            "idle_s": settings.idle_s,
            "limits": asdict(settings.limits),
        }
        log = self._log(socket)
        with suppress(FileNotFoundError):
            log.replace(log.with_suffix(".before.log"))
        child = Child(
            settings.command,
            environment=os.environ | {"CUDA_VISIBLE_DEVICES": settings.gpu or ""},
            log=log,
            wire="lines",
        )
        before = self._children.get(socket)
        self._children[socket] = child
        if before is not None:
            await _end(before)
        child.pipe.send(order)
        while not child.pipe.receive():
            if child.pipe.is_over:
                code = await child.ended()
                words = last_words(self._log(socket)) or f"it ended with code {code}"
                raise SamplerUnavailable(f"the sampler of {base} cannot be started: {words}")
            await asyncio.sleep(LOOK_S)

    def _socket(self, base: str) -> Path:
        """The socket of a base, by what the base is and where it is sampled from."""
        known = json.dumps([self._base(base), self._settings.gpu], sort_keys=True)
        return self._folder / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}.sock"

    def _base(self, name: str) -> Mapping[str, Any]:
        try:
            return self._base_of(name)
        except KeyError:
            raise SamplingRefused(f"base must be one of the service's, got {name!r:.80}") from None

    @staticmethod
    def _log(socket: Path) -> Path:
        return socket.with_suffix(".log")
