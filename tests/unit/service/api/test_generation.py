"""Routes of generation over samplers that fail, wait, or are not there."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.helpers.http_service import BASE, Api, bearer, listening
from tests.helpers.tiny_tokenizer import (
    EOS_ID,
    NO_CALLS_TEMPLATE,
    TOOL,
    TOOLS_TEMPLATE,
    byte_ids,
    tiny_tokenizer,
)
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.runtime.sampling.batcher import Words
from tlora_megatron.runtime.sampling.values import Piece, Prompt
from tlora_megatron.service.home import Home
from tlora_megatron.service.sampling.own import OwnSampler
from tlora_megatron.service.sampling.process import SamplingProcess
from tlora_megatron.service.sampling.sampler import (
    Sampler,
    SamplerBusy,
    SamplerUnavailable,
    SamplingRefused,
)
from tlora_megatron.service.sampling.vllm_sampler import VllmSampler
from tlora_megatron.service.settings import add_passed_on_arguments, open_sampler, passed_on_words


class Scripted(Sampler):
    """Does what the first token of a prompt says."""

    def __init__(self) -> None:
        self.asked: list[Prompt] = []
        self.began, self.left = asyncio.Event(), asyncio.Event()

    async def stream(self, base: str, prompts: Sequence[Prompt]) -> AsyncIterator[Piece]:
        self.asked += prompts
        word = prompts[0].tokens[0]
        if word == 1:
            raise SamplerUnavailable("the sampler in /home/somebody has ended")
        if word == 2:
            raise SamplingRefused("prompt must be nicer, got 2")
        if word == 5:
            raise SamplerBusy("the sampler must have fewer requests waiting")
        yield Piece(prompt=0, tokens=(65,), logprobs=(-1.0,), text="A")
        if word == 3:
            raise SamplerUnavailable("gone")
        if word == 4:
            self.began.set()
            try:
                await asyncio.sleep(1000)
            finally:
                self.left.set()
        yield Piece(prompt=0, tokens=(66,), logprobs=(-1.0,), text="B", stop_reason="length")

    async def encode(self, base: str, asked: Any, template: str | None = None) -> list[int]:
        return list(str(asked).encode())

    async def close(self) -> None: ...


@pytest.fixture
def sampler() -> Scripted:
    return Scripted()


@pytest.fixture
def settings(sampler: Scripted) -> dict[str, Any]:
    return {"sampler": sampler}


def request(*prompt: int, **fields: Any) -> dict[str, Any]:
    return {"model": BASE, "prompt": list(prompt), **fields}


def test_harmless_fields_are_passed_over(api: Api, sampler: Scripted) -> None:
    fields = {
        "user": "x",
        "store": False,
        "metadata": {"a": "b"},
        "presence_penalty": 0,
        "tools": [],
        "best_of": 1,
        "logit_bias": None,
        "top_k": -1,
    }
    answer = api.client().post("/v1/completions", json=request(9, **fields))
    assert answer.json()["choices"][0]["text"] == "AB"
    assert answer.json()["system_fingerprint"].startswith("base-")
    assert answer.json()["usage"]["completion_tokens"] == 2
    (prompt,) = sampler.asked
    assert (prompt.params.max_tokens, prompt.params.top_k, prompt.adapter) == (16, None, None)


def test_what_is_not_there_is_refused_by_name(api: Api) -> None:
    fields = {"tools": [{}], "best_of": 2, "presence_penalty": 3, "nonsense": 1}
    for name, value in fields.items():
        answer = api.client().post("/v1/completions", json=request(9, **{name: value}))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name


class Calling(Sampler):
    """Answers by the tokenizer that a process of ours would have, always the same."""

    def __init__(self, answer: str, template: str = TOOLS_TEMPLATE) -> None:
        self.answer, self.asked = answer, ""
        words = Words(
            tokenizer=tiny_tokenizer(chat_template=template),
            eos=frozenset(),
            vocab_size=300,
            max_positions=4096,
        )
        self.process = SamplingProcess(SimpleNamespace(words=words), 1.0)  # type: ignore[arg-type]

    async def encode(self, base: str, asked: Any, template: str | None = None) -> list[int]:
        return self.process._encode({"asked": asked, "template": template})

    async def decode(self, base: str, tokens: Sequence[int]) -> str:
        return str(self.process._decode({"tokens": tokens})["text"])

    async def token_texts(self, base: str, tokens: Sequence[int]) -> list[str]:
        return list(self.process._decode({"tokens": tokens, "each": True})["texts"])

    async def stream(self, base: str, prompts: Sequence[Prompt]) -> AsyncIterator[Piece]:
        self.asked = await self.decode(base, prompts[0].tokens)
        for letter in self.answer:
            yield Piece(prompt=0, tokens=tuple(byte_ids(letter)), logprobs=(-1.0,), text=letter)
        yield Piece(prompt=0, tokens=(EOS_ID,), logprobs=(-1.0,), stop_reason="stop")

    async def close(self) -> None: ...


CHAT = {"model": BASE, "messages": [{"role": "user", "content": "Rome?"}], "tools": [TOOL]}


def call(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ("Sunny.", "Sunny.", []),
        ("I look. " + call("get_weather", '{"city": "Rome"}'), "I look.", ['{"city": "Rome"}']),
        (call("get_weather", "{}") + call("get_weather", '{"a": 1}'), None, ["{}", '{"a": 1}']),
        (call("launch", "{}"), call("launch", "{}"), []),
        (call("get_weather", "[1]"), call("get_weather", "[1]"), []),
        (call("get_weather", "{}") + " or so", call("get_weather", "{}") + " or so", []),
    ],
)
def test_calls_of_tools_are_read_as_the_template_writes_them(
    api: Api, answer: str, content: str | None, calls: list[str]
) -> None:
    api.service.sampler = sampler = Calling(answer)
    with listening(api.app) as address, OpenAI(base_url=f"{address}/v1", api_key=api.token()) as ai:
        (whole,) = ai.chat.completions.create(**CHAT).choices
        chunks = list(ai.chat.completions.create(**CHAT, stream=True))
    assert '"name": "get_weather"' in sampler.asked
    assert whole.finish_reason == ("tool_calls" if calls else "stop")
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    told = "".join(delta.content or "" for delta in deltas) or None
    assert (whole.message.content, told) == (content, content)
    streamed = [one for delta in deltas for one in delta.tool_calls or ()]
    for found in (whole.message.tool_calls or [], streamed):
        assert [one.function.arguments for one in found] == calls
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_a_conversation_goes_on_with_what_was_answered(api: Api) -> None:
    called = call("get_weather", '{"city": "Rome"}')
    api.service.sampler = sampler = Calling("Rome: " + called + called)
    asked: dict[str, Any] = {**CHAT, "extra_body": {"chat_template_kwargs": {"no_think": True}}}
    with listening(api.app) as address, OpenAI(base_url=f"{address}/v1", api_key=api.token()) as ai:
        create = ai.chat.completions.create
        chunks = [chunk.choices[0] for chunk in create(**asked, stream=True)]
        one = create(**asked, parallel_tool_calls=False).choices[0].message
        (found,) = one.tool_calls or ()
        result: Any = {"role": "tool", "tool_call_id": found.id, "content": "20C"}
        parts: Any = {"role": "user", "content": [{"type": "text", "text": p} for p in "ab"]}
        create(**{**asked, "messages": [*CHAT["messages"], one, result, parts]})
    assert sampler.asked.endswith(
        f"<|user|>Rome?<|end|><|assistant|><think></think>Rome:{called}</s><|tool|>20C<|end|>"
        "<|user|>ab<|end|><|assistant|><think></think>"
    )
    assert "".join(chunk.delta.content or "" for chunk in chunks[:8]) == "Rome:", "as it comes"
    assert [call.index for call in chunks[-1].delta.tool_calls or ()] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no call can be forced"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]},
            "tools[0].function.strict",
            "arguments are not held to a schema",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format", "held to a format"),
        ({"top_logprobs": 2}, "top_logprobs", "must come with logprobs: true"),
        ({"messages": []}, "messages", "messages is refused"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            None,
            "messages[0].content[0] must be a part of type text, got {'type': 'image_url'}",
        ),
        ({"tools": [{"name": "f"}]}, None, "tools[0] must be an object whose function has a name"),
        ({"chat_template_kwargs": {"think": 1}}, None, "variables of the chat template"),
        ({}, None, "must be written by the chat template"),
    ],
)
def test_what_answers_cannot_be_held_to_is_refused(
    api: Api, fields: dict[str, Any], param: str | None, told: str
) -> None:
    api.service.sampler = Calling("", NO_CALLS_TEMPLATE)
    answer = api.client().post("/v1/chat/completions", json=CHAT | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (
        400, "invalid_request_error", param,
    )  # fmt: skip
    assert told in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_failures_have_a_status_of_their_own_and_name_no_path(api: Api, stream: bool) -> None:
    client = api.client()
    broken = client.post("/v1/completions", json=request(1, stream=stream))
    assert broken.status_code == 503
    assert "somebody" not in broken.text
    refused = client.post("/v1/completions", json=request(2, stream=stream))
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400, "prompt must be nicer, got 2",
    )  # fmt: skip
    busy = client.post("/v1/completions", json=request(5, stream=stream))
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")


def test_stream_that_breaks_off_says_so(api: Api) -> None:
    answer = api.client().post("/v1/completions", json=request(3, stream=True))
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert json.loads(events[0])["choices"][0]["text"] == "A"
    assert json.loads(events[0])["system_fingerprint"].startswith("base-")
    assert json.loads(events[1])["error"]["type"] == "server_error"
    assert events[2:] == ["[DONE]"]


def test_service_without_a_sampler_and_caller_without_the_scope(api: Api) -> None:
    reader = api.client("ann", ("read",))
    assert reader.post("/v1/completions", json=request(9)).status_code == 403
    api.service.sampler = None
    answer = api.client().post("/v1/completions", json=request(9))
    assert answer.status_code == 404
    assert "--sampler own or vllm" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_hangs_up_takes_its_request_back(
    api: Api, sampler: Scripted, stream: bool
) -> None:
    async def ask(address: str) -> None:
        body = request(4, stream=stream)
        async with httpx.AsyncClient(headers=bearer(api.token()), timeout=None) as client:
            task = asyncio.create_task(client.post(f"{address}/v1/completions", json=body))
            while not sampler.began.is_set():  # set on the server's loop
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while not sampler.left.is_set():
            await asyncio.sleep(0.005)

    with listening(api.app) as address:
        asyncio.run(ask(address))


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], OwnSampler),
        (["--sampler", "own", "--sampler-gpu", "3", "--sampler-memory", "20"], OwnSampler),
        (["--sampler", "vllm", "--sampler-address", "http://127.0.0.1:1/"], VllmSampler),
        (
            ["--sampler=vllm", "--sampler-address=http://127.0.0.1:1", "--sampler-may-differ"],
            VllmSampler,
        ),
        (["--sampler=vllm", "--sampler-address=u", "--sampler-address=v"], VllmSampler),
        (["--sampler=sglang", "--sampler-address=u"], VllmSampler),
        (["--sampler=vllm", "--sampler-words=--max-loras 2 --enforce-eager"], VllmSampler),
        (["--sampler", "off"], None),
    ],
)
def test_words_choose_a_sampler(tmp_path: Path, words: list[str], kind: type[Any] | None) -> None:
    parser = argparse.ArgumentParser()
    add_passed_on_arguments(parser)
    args = parser.parse_args(passed_on_words(parser.parse_args(words)))
    assert args == parser.parse_args(words)
    found = open_sampler(args, Home.open(tmp_path))
    assert found is None if kind is None else isinstance(found, kind)


def test_a_server_that_may_differ_has_an_address(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_passed_on_arguments(parser)
    args = parser.parse_args(["--sampler=vllm", "--sampler-may-differ"])
    with pytest.raises(ConfigError, match="may-differ must be given with --sampler-address"):
        open_sampler(args, Home.open(tmp_path))
