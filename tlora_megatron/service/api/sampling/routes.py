"""`/v1/completions` and `/v1/chat/completions`, streaming and not."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from tlora_megatron.runtime.sampling.values import Piece, Prompt
from tlora_megatron.service.api.gate import ApiError, Caller, Submitter, native_format
from tlora_megatron.service.api.openai.models import Model, find_model
from tlora_megatron.service.api.sampling.bodies import (
    ChatBody,
    CompletionBody,
    SamplingBody,
)
from tlora_megatron.service.api.sampling.calls import CallReader
from tlora_megatron.service.api.sampling.replies import ChatForm, CompletionForm, Form, TokenNames
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.home import held
from tlora_megatron.service.sampling.sampler import (
    Sampler,
    SamplerBusy,
    SamplerUnavailable,
    SamplingRefused,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["generation"])

    async def asked(body: SamplingBody, caller: Caller) -> _Asked:
        body.check_rest()
        if service.sampler is None:
            sentence = "the service must be started with --sampler own or vllm to generate"
            raise ApiError(404, sentence)
        model = await service.read(find_model, service, caller, body.model)
        return _Asked(service.sampler, model)

    @routes.post("/completions")
    async def complete(body: CompletionBody, caller: Submitter, request: Request) -> Any:
        """Continues texts."""
        return await _unless_gone(request, (await asked(body, caller)).complete(body))

    @routes.post("/chat/completions")
    async def chat(body: ChatBody, caller: Submitter, request: Request) -> Any:
        """Answers messages, by the chat template of the base's tokenizer."""
        return await _unless_gone(request, (await asked(body, caller)).chat(body))

    return routes


class _Asked:
    """One request."""

    def __init__(self, sampler: Sampler, model: Model) -> None:
        self._sampler = sampler
        self._model = model
        self._names = TokenNames(sampler, model.base)

    async def complete(self, body: CompletionBody) -> Any:
        with _sentences(self._model):
            if body.echo and body.stream:
                raise ApiError(400, "echo must be false with stream, got true", param="echo")
            encoded = [
                await self._sampler.encode(self._model.base, prompt)
                if isinstance(prompt, str)
                else prompt
                for prompt in body.prompts
            ]
            prompts = [self._prompt(body, tokens, body.chosen) for tokens in encoded]
            echoes: list[str] = []
            if body.echo:
                prompts = [
                    replace(own, prompt_logprobs=True, top_prompt_logprobs=own.params.top_logprobs)
                    for own in prompts
                ]
                echoes = [
                    prompt
                    if isinstance(prompt, str)
                    else await self._sampler.decode(self._model.base, prompt)
                    for prompt in body.prompts
                ]
            wants = body.logprobs is not None
            form = CompletionForm(self._model, self._names, wants, prompts, echoes)
            return await self._reply(body, prompts, form)

    async def chat(self, body: ChatBody) -> Any:
        with _sentences(self._model):
            sampler, base, tools = self._sampler, self._model.base, body.offered
            calls = await CallReader.learn(sampler, base, tools) if tools else None
            tokens = await sampler.encode(base, body.conversation, tools=tools)
            prompts = [self._prompt(body, tokens, body.chosen)]
            form = ChatForm(self._model, self._names, bool(body.logprobs), calls)
            return await self._reply(body, prompts, form)

    def _prompt(self, body: SamplingBody, tokens: Sequence[int], params: Any) -> Prompt:
        adapter = self._model.adapter
        return Prompt(
            tokens=tuple(tokens),
            adapter=None if adapter is None else str(adapter),
            params=params,
            num_samples=body.num_samples,
        )

    async def _reply(self, body: SamplingBody, prompts: Sequence[Prompt], form: Form) -> Any:
        if not body.stream:
            return await self._whole(body, prompts, form)
        pieces = self._stream(prompts)
        first = await anext(pieces, None)  # what is refused has a status of its own

        async def all_pieces() -> AsyncIterator[Piece]:
            if first is not None:
                yield first
            async for piece in pieces:
                yield piece

        lines = self._lines(body, prompts, form, all_pieces())
        return StreamingResponse(lines, media_type="text/event-stream")

    async def _stream(self, prompts: Sequence[Prompt]) -> AsyncIterator[Piece]:
        """Yields pieces while the adapter's folder is kept."""
        with held(self._model.adapter):
            async for piece in self._sampler.stream(self._model.base, prompts):
                yield piece

    async def _whole(
        self, body: SamplingBody, prompts: Sequence[Prompt], form: Form
    ) -> dict[str, Any]:
        with held(self._model.adapter):
            answers = await self._sampler.generate(self._model.base, prompts)
        choices: list[dict[str, Any]] = []
        for number, answer in enumerate(answers):
            for sequence in answer.sequences or (None,):
                alone = replace(answer, sequences=() if sequence is None else (sequence,))
                choices.append(await form.whole(len(choices), number, alone))
        made = sum(len(one.tokens) for answer in answers for one in answer.sequences)
        return {**form.envelope(choices, is_chunk=False), "usage": _usage(prompts, made)}

    async def _lines(
        self,
        body: SamplingBody,
        prompts: Sequence[Prompt],
        form: Form,
        pieces: AsyncIterator[Piece],
    ) -> AsyncIterator[str]:
        made = 0
        opened: set[int] = set()
        try:
            async for piece in pieces:
                if piece.scores is not None:
                    continue
                index = piece.prompt * body.num_samples + piece.sample
                opening = form.opening(index)
                if opening is not None and index not in opened:
                    opened.add(index)
                    yield _event(form.envelope([opening], is_chunk=True))
                made += len(piece.tokens)
                choice = await form.chunk(index, piece)
                yield _event(form.envelope([choice], is_chunk=True))
            if body.wants_usage:
                end = form.envelope([], is_chunk=True)
                yield _event({**end, "usage": _usage(prompts, made)})
        except (SamplingRefused, SamplerBusy, SamplerUnavailable) as error:
            yield _event(native_format(_as_api_error(error, self._model)))
        yield "data: [DONE]\n\n"


@contextmanager
def _sentences(model: Model) -> Iterator[None]:
    """Turns what a sampler raises into answers of HTTP."""
    try:
        yield
    except (SamplerBusy, SamplerUnavailable, ValueError) as error:
        raise _as_api_error(error, model) from error


def _as_api_error(error: Exception, model: Model) -> ApiError:
    message = str(error)
    if model.adapter is not None:  # paths of the service's host are nobody's business
        message = message.replace(str(model.adapter), model.name)
    if isinstance(error, SamplerBusy):
        return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
    if isinstance(error, SamplerUnavailable):
        logger.error("%s", error)
        sentence = "the sampler cannot be used now; the service's log says why"
        return ApiError(503, sentence, headers={"Retry-After": "5"})
    return ApiError(400, message)


def _usage(prompts: Sequence[Prompt], made: int) -> dict[str, int]:
    read = sum(len(prompt.tokens) for prompt in prompts)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def _event(body: Any) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | Response:
    """Returns what the work returns; cancels it when the client has gone."""
    task = asyncio.create_task(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=499)
    finally:
        task.cancel()
        gone.cancel()
