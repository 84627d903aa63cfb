"""A `Sampler` over vLLM's servers: some that run already, or one for each base that is started."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora_megatron.config.sections import read_base_model
from tlora_megatron.runtime.sampling.values import Answer, Piece, Prompt, gather
from tlora_megatron.service.sampling.own import BaseOf
from tlora_megatron.service.sampling.sampler import (
    Sampler,
    SamplerAway,
    SamplerBusy,
    SamplerUnavailable,
    SamplingRefused,
)
from tlora_megatron.service.sampling.vllm_door import Door, NamedAdapter, ServerGone
from tlora_megatron.service.sampling.vllm_server import (
    Server,
    VllmSettings,
    pieces_of,
    start_server,
    to_request,
    warm_adapter,
)

if TYPE_CHECKING:
    from tlora_megatron.service.sampling.vllm_probe import ProbeSettings
    from tlora_megatron.training.data.job_data import TokenizerFolder

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_MOST_BREAKS = 5
"""Servers that may break a request off, which might be to blame for it."""


class VllmSampler(Sampler):
    """Samples by vLLM; adapters are loaded into it as the PEFT folders that they are.

    Args:
        running: servers that serve the bases under their names; none = servers are started.
        door: how servers that run are asked; one that is started is vLLM.
        probe: how their bases are compared with those that train; None = they are not.
    """

    def __init__(
        self,
        folder: Path,
        base_of: BaseOf,
        settings: VllmSettings = VllmSettings(),  # noqa: B008 - frozen
        running: Sequence[Server] = (),
        probe: ProbeSettings | None = None,
        door: type[Door] = Door,
    ) -> None:
        self._door_type = door
        self._folder = folder
        self._base_of = base_of
        self._settings = settings
        self._running = [self._door(server, probe) for server in running]
        self._started: dict[str, asyncio.Task[Door]] = {}
        self._warming: dict[Door, asyncio.Task[None]] = {}
        self._num_open = 0
        self._writer = ThreadPoolExecutor(1)
        self._tokenizers: dict[Path, TokenizerFolder] = {}
        """By base's folder; used on the writer's thread alone."""

    def _door(self, server: Server, probe: ProbeSettings | None = None) -> Door:
        settings = self._settings
        door = self._door_type(server, slots=settings.adapters, most_rank=settings.most_rank)
        if probe is not None:
            # Not at the top: it needs numpy.
            from tlora_megatron.service.sampling.vllm_probe import Probe

            encode, generate = partial(_encode, door), partial(_generate_one, door)
            door.probe = Probe(probe, generate, encode, door.told)
        return door

    def stream(self, base: str, prompts: Sequence[Prompt]) -> AsyncIterator[Piece]:
        return self._pieces(base, prompts, streams=True)

    async def generate(self, base: str, prompts: Sequence[Prompt]) -> list[Answer]:
        pieces = self._pieces(base, prompts, streams=False)
        return gather(prompts, [piece async for piece in pieces])

    def check_room(self) -> None:
        if self._num_open >= (most := self._settings.most_waiting):
            raise SamplerBusy(
                f"the sampler must have at most {most} prompts waiting, got one more: try again "
                "soon"
            )

    async def _pieces(
        self, base: str, prompts: Sequence[Prompt], *, streams: bool
    ) -> AsyncIterator[Piece]:
        told: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

        async def ask(number: int, prompt: Prompt) -> None:
            try:
                async for piece in self._ask(base, number, prompt, streams):
                    told.put_nowait(piece)
                told.put_nowait(None)
            except Exception as error:
                told.put_nowait(error)

        self.check_room()
        self._num_open += len(prompts)
        tasks = [asyncio.create_task(ask(*one)) for one in enumerate(prompts)]
        try:
            left = len(tasks)
            while left:
                found = await told.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            self._num_open -= len(prompts)
            for task in tasks:
                task.cancel()

    async def encode(
        self, base: str, asked: str | Mapping[str, Any], template: str | None = None
    ) -> list[int]:
        if not isinstance(asked, str):  # vLLM writes chats by another code than training
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._writer, self._write, base, asked, template)
        answer = await self._post(base, "/tokenize", {"prompt": asked})
        return [int(token) for token in answer["tokens"]]

    def _write(self, base: str, chat: Mapping[str, Any], template: str | None) -> list[int]:
        # Not at the top: few services need a tokenizer here, which is more than a second's import.
        from tlora_megatron.training.data.job_data import TokenizerFolder
        from tlora_megatron.training.data.tokenize import encode_prompt

        folder = read_base_model(dict(self._section(base)), Path("/")).folder
        try:
            source = self._tokenizers.setdefault(folder, TokenizerFolder(folder))
            tokenizer = source.tokenizer
        except ValueError as error:
            raise SamplerUnavailable(str(error)) from error
        try:
            return encode_prompt(tokenizer, chat, template)
        except ValueError as error:
            raise SamplingRefused(str(error)) from error

    async def decode(self, base: str, tokens: Sequence[int]) -> str:
        return str((await self._post(base, "/detokenize", {"tokens": list(tokens)}))["prompt"])

    async def token_texts(self, base: str, tokens: Sequence[int]) -> list[str]:
        return list(await asyncio.gather(*(self.decode(base, [token]) for token in tokens)))

    async def open(self) -> None:
        for door in self._running:
            self._warm(door)

    async def close(self) -> None:
        """Ends the servers that were started here."""
        for task in (*self._started.values(), *self._warming.values()):
            task.cancel()
        found = await asyncio.gather(*self._started.values(), return_exceptions=True)
        self._started.clear()
        for door in [*self._running, *(one for one in found if isinstance(one, Door))]:
            await door.close()
        self._writer.shutdown(wait=False)

    async def _ask(
        self, base: str, number: int, prompt: Prompt, streams: bool
    ) -> AsyncIterator[Piece]:
        adapter = None if prompt.adapter is None else NamedAdapter.of(prompt.adapter)
        body = to_request(prompt, streams=streams)
        async with aclosing(self._answers(base, "/v1/completions", body, adapter)) as answers:
            async for answer in answers:
                for piece in pieces_of(number, prompt, answer):
                    yield piece

    async def _post(self, base: str, path: str, body: Mapping[str, Any]) -> Any:
        return await anext(self._answers(base, path, body))

    async def _answers(
        self,
        base: str,
        path: str,
        body: Mapping[str, Any],
        adapter: NamedAdapter | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Yields what a server answers; asks again, or another, when one goes without a word."""
        breaks, end_s = 0, None
        while True:
            door = await self._pick(base, adapter)
            is_told = False
            try:
                if door.probe is not None:
                    await door.probe.check(base, self._section(base))
                async with door.lease(adapter, body.get("n", 1)) as model:
                    door.check_serves(base)
                    async for answer in door.answers(path, {"model": model or base, **body}):
                        is_told = True
                        yield answer
                door.is_warm |= adapter is not None
                return
            except ServerGone as error:
                if error.was_there or end_s is None:
                    end_s = time.monotonic() + self._settings.patience_s
                breaks += error.was_there
                sentence = f"{door.kind} does not answer for {base}: {error}"
                if is_told or breaks == _MOST_BREAKS:
                    raise SamplerUnavailable(sentence) from error
                if time.monotonic() >= end_s:
                    raise SamplerAway(sentence) from error
                logger.warning("%s; the request is asked again", error)

    async def _pick(self, base: str, adapter: NamedAdapter | None) -> Door:
        """The server with the least to do that answers, one with the adapter if it can be.

        One that was away takes part once it is warm, unless there is no other.
        """
        while True:
            doors = self._running or [await self._own(base)]
            ready = [door for door in doors if door.rest_until_s <= time.monotonic()]
            warm = [door for door in ready if door.is_warm]
            for door in ready if warm else ():
                self._warm(door)
            if ready:
                return min(warm or ready, key=lambda door: door.cost(adapter))
            await asyncio.sleep(_LOOK_S)

    def _warm(self, door: Door) -> None:
        if not door.is_warm and door not in self._warming:
            task = self._warming[door] = asyncio.create_task(self._sample_once(door))
            task.add_done_callback(lambda _: self._warming.pop(door))

    async def _sample_once(self, door: Door) -> None:
        """Samples with an adapter beside requests: the first time takes vLLM 29 s on CPUs."""
        try:
            for base in await door.models():
                with suppress(KeyError):  # it serves others, too
                    section = self._base_of(base)
                    folder = await asyncio.to_thread(warm_adapter, self._folder, section)
                    async with door.lease(NamedAdapter.of(str(folder)), 1) as model:
                        body = {"model": model, "prompt": [0], "max_tokens": 1}
                        await anext(door.answers("/v1/completions", body))
        except ServerGone:
            return
        except Exception as error:  # requests have words of their own for it
            logger.warning("%s is asked without a first sample: %s", door.server.address, error)
        door.is_warm = True

    async def _own(self, base: str) -> Door:
        """Our server for a base; all that ask at once wait for the same start."""
        task = former = self._started.get(base)
        if task is not None and task.done():
            task = None if task.exception() or task.result().server.is_over else former
        if task is None:
            task = self._started[base] = asyncio.create_task(self._start(base, former))
        return await asyncio.shield(task)

    async def _start(self, base: str, former: asyncio.Task[Door] | None) -> Door:
        if former is not None and former.exception() is None:
            await former.result().close()
        section = self._section(base)
        return self._door(await start_server(self._folder, base, section, self._settings))

    def _section(self, base: str) -> Mapping[str, Any]:
        try:
            return self._base_of(base)
        except KeyError:
            rule = f"base must be one of the service's, got {base!r:.80}"
            raise SamplingRefused(rule) from None


async def _encode(door: Door, base: str, text: str) -> list[int]:
    answer = await anext(door.answers("/tokenize", {"model": base, "prompt": text}))
    return [int(token) for token in answer["tokens"]]


async def _generate_one(door: Door, base: str, prompt: Prompt) -> Answer:
    body = {"model": base, **to_request(prompt, streams=False)}
    answer = await anext(door.answers("/v1/completions", body))
    return gather([prompt], pieces_of(0, prompt, answer))[0]
