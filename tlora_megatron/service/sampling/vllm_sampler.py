"""A `Sampler` over vLLM's server: one that runs already, or one for each base that is started."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tlora_megatron.runtime.sampling.values import AdapterKey, Answer, Piece, Prompt, gather
from tlora_megatron.service.sampling.own import BaseOf
from tlora_megatron.service.sampling.sampler import (
    Sampler,
    SamplerUnavailable,
    SamplingRefused,
)
from tlora_megatron.service.sampling.vllm_server import (
    Server,
    VllmSettings,
    end_server,
    pieces_of,
    start_server,
    to_request,
)
from tlora_megatron.training.data.rows import read_messages

if TYPE_CHECKING:
    from tlora_megatron.service.sampling.vllm_probe import Probe, ProbeSettings


_CONNECT_S = 5.0
_LOADED = "has already been loaded"
"""In what vLLM answers to a name that it knows."""


class VllmSampler(Sampler):
    """Samples by vLLM; adapters are loaded into it as the PEFT folders that they are.

    Args:
        running: a server that serves the bases under their names; None = servers are started.
        probe: how its bases are compared with those that train; None = they are not.
    """

    def __init__(
        self,
        folder: Path,
        base_of: BaseOf,
        settings: VllmSettings = VllmSettings(),  # noqa: B008 - frozen
        running: Server | None = None,
        probe: ProbeSettings | None = None,
    ) -> None:
        self._folder = folder
        self._base_of = base_of
        self._settings = settings
        self._running = running
        self._servers: dict[str, Server] = {}
        self._loaded: dict[tuple[str, str], list[str]] = {}
        """Address and key -> names of the adapters there, the least lately used first."""
        self._probe: Probe | None = None
        if probe is not None:
            # Not at the top: it needs numpy.
            from tlora_megatron.service.sampling.vllm_probe import Probe

            self._probe = Probe(probe, self._generate_one, self.encode, self._get)
        self._lock = asyncio.Lock()
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=_CONNECT_S))

    async def stream(self, base: str, prompts: Sequence[Prompt]) -> AsyncIterator[Piece]:
        if self._probe is not None:
            await self._probe.check(base, self._section(base))
        async for piece in self._stream(base, prompts):
            yield piece

    async def _stream(self, base: str, prompts: Sequence[Prompt]) -> AsyncIterator[Piece]:
        told: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

        async def ask(number: int, prompt: Prompt) -> None:
            try:
                async for piece in self._ask(base, number, prompt):
                    told.put_nowait(piece)
                told.put_nowait(None)
            except Exception as error:
                told.put_nowait(error)

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
            for task in tasks:
                task.cancel()

    async def encode(
        self,
        base: str,
        text: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        if isinstance(text, str):
            body: dict[str, Any] = {"prompt": text}
        else:
            try:
                read_messages(text)  # vLLM passes over keys that it does not know
            except ValueError as error:
                raise SamplingRefused(str(error)) from error
            body = {"messages": list(text)} | ({"tools": list(tools)} if tools else {})
        answer = await self._post(base, "/tokenize", {"model": base, **body})
        return [int(token) for token in answer["tokens"]]

    async def decode(self, base: str, tokens: Sequence[int]) -> str:
        body = {"model": base, "tokens": list(tokens)}
        return str((await self._post(base, "/detokenize", body))["prompt"])

    async def token_texts(self, base: str, tokens: Sequence[int]) -> list[str]:
        return list(await asyncio.gather(*(self.decode(base, [token]) for token in tokens)))

    async def close(self) -> None:
        """Ends the servers that were started here."""
        await self._client.aclose()
        for server in self._servers.values():
            await end_server(server)
        self._servers.clear()

    async def _ask(self, base: str, number: int, prompt: Prompt) -> AsyncIterator[Piece]:
        server = await self._server(base)
        model = base if prompt.adapter is None else await self._load(base, server, prompt.adapter)
        body = to_request(model, prompt)
        try:
            async with self._client.stream(
                "POST", f"{server.address}/v1/completions", json=body, headers=server.headers
            ) as answer:
                if not answer.is_success:
                    await answer.aread()
                    _check(answer)
                if not body["stream"]:
                    await answer.aread()
                    for piece in pieces_of(number, prompt, answer.json()):
                        yield piece
                    return
                async for line in answer.aiter_lines():
                    event = line.removeprefix("data: ")
                    if line != event and event != "[DONE]":
                        for piece in pieces_of(number, prompt, _event(event)):
                            yield piece
        except httpx.TransportError as error:
            raise SamplerUnavailable(f"vLLM does not answer for {base}: {error}") from error

    async def _server(self, base: str) -> Server:
        if self._running is not None:
            return self._running
        async with self._lock:  # all that ask at once wait for the same start
            found = self._servers.get(base)
            if found is None or found.is_over:
                section = self._section(base)
                found = await start_server(self._folder, base, section, self._settings)
                self._servers[base] = found
            return found

    def _section(self, base: str) -> Mapping[str, Any]:
        try:
            return self._base_of(base)
        except KeyError:
            rule = f"base must be one of the service's, got {base!r:.80}"
            raise SamplingRefused(rule) from None

    async def _generate_one(self, base: str, prompt: Prompt) -> Answer:
        return gather([prompt], [piece async for piece in self._stream(base, [prompt])])[0]

    async def _get(self, path: str) -> Mapping[str, Any]:
        """What a server that runs already tells of itself; nothing where it does not."""
        assert self._running is not None, "ours have nothing to tell"
        try:
            answer = await self._client.get(
                self._running.address + path, headers=self._running.headers
            )
            found = answer.json() if answer.is_success else None
        except (httpx.HTTPError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _load(self, base: str, server: Server, folder: str) -> str:
        """Makes sure that a server has an adapter; returns the adapter's name there."""
        try:
            key = AdapterKey.of(folder)
        except ValueError as error:
            raise SamplingRefused(str(error)) from error
        if key.is_checkpoint:
            raise SamplingRefused(
                f"adapter must be what PEFT loads for vLLM, got the checkpoint {folder}; wait for "
                f"the job's end, or serve with --sampler own"
            )
        name = f"lora-{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}"
        async with self._lock:
            names = self._loaded.setdefault((server.address, base), [])
            if name in names:
                names.remove(name)
            else:
                body = {"lora_name": name, "lora_path": folder}
                try:
                    await self._post(base, "/v1/load_lora_adapter", body, server)
                except SamplingRefused as error:
                    # By a process before this one: the name stands for these very files.
                    if _LOADED not in str(error):
                        raise
            names.append(name)
            if len(names) > self._settings.adapters:
                gone = names.pop(0)
                await self._post(base, "/v1/unload_lora_adapter", {"lora_name": gone}, server)
        return name

    async def _post(
        self, base: str, path: str, body: Mapping[str, Any], server: Server | None = None
    ) -> Any:
        server = server or await self._server(base)
        try:
            answer = await self._client.post(
                server.address + path, json=body, headers=server.headers
            )
        except httpx.TransportError as error:
            raise SamplerUnavailable(f"vLLM does not answer for {base}: {error}") from error
        _check(answer)
        # Adapters are answered with a sentence.
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.json() if is_json else answer.text


def _event(text: str) -> Mapping[str, Any]:
    event: Mapping[str, Any] = json.loads(text)
    if "error" in event:
        raise SamplerUnavailable(f"vLLM gave up: {event['error']}")
    return event


def _check(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    try:
        body = answer.json()
        message = str(body.get("error", body).get("message", body))
    except (ValueError, AttributeError):
        message = answer.text[:500]
    if answer.status_code in (400, 404, 422):
        raise SamplingRefused(message)
    raise SamplerUnavailable(f"vLLM answered {answer.status_code}: {message}")
