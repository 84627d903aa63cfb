"""The sampling process and the sampler that starts it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.helpers.launch import HANG_S
from tests.helpers.tiny_tokenizer import byte_ids, tiny_tokenizer
from tlora_megatron.channel import LinePipe, to_line
from tlora_megatron.runtime.sampling.tracks import Request, Tell
from tlora_megatron.runtime.sampling.values import Piece, Prompt, SamplingParams, Scores
from tlora_megatron.service.sampling.own import OwnSampler, OwnSettings
from tlora_megatron.service.sampling.process import SamplingProcess
from tlora_megatron.service.sampling.sampler import (
    SamplerBusy,
    SamplerUnavailable,
    SamplingRefused,
)
from tlora_megatron.service.sampling.wire import connect, prompt_to_json

FAKE = (sys.executable, "-m", "tests.helpers.fake_sampler")

pytestmark = pytest.mark.anyio
LONG = Prompt(tokens=(1, 10), params=SamplingParams(max_tokens=5))


@asynccontextmanager
async def opened(folder: Path, idle_s: float = 60.0) -> AsyncIterator[OwnSampler]:
    """A sampler whose bases are told by their names."""
    bases = {name: {"path": name} for name in ("good", "refuse", "die 1", "die 9", "drop 1")}
    settings = OwnSettings(idle_s=idle_s, command=FAKE, most_open=300, most_waiting=400)
    sampler = OwnSampler(folder / "deep" / ("x" * 90), bases.__getitem__, settings)
    try:
        async with asyncio.timeout(HANG_S):
            yield sampler
    finally:
        await sampler.close()


async def test_one_process_serves_all_who_ask_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as sampler:
        asked = (sampler.encode("good", "x") for _ in range(5))
        assert len({tuple(one) for one in await asyncio.gather(*asked)}) == 1
        (socket,) = tmp_path.rglob("*.sock")
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        answers = await sampler.generate("good", [LONG, Prompt(tokens=(7,))])
        assert [one.sequences[0].tokens for one in answers] == [
            (11, 12, 13, 14, 15),
            (8, 9, 10),
        ]
        async with opened(tmp_path) as second:
            assert await second.encode("good", "x") == await sampler.encode("good", "x")
            assert not second._children


async def test_request_is_asked_once_more_and_its_pieces_are_told_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as sampler:
        tokens = [piece.tokens[0] async for piece in sampler.stream("die 1", [LONG])]
        assert tokens == [11, 12, 13, 14, 15]
        with pytest.raises(SamplerUnavailable, match="sampler of die 9 has ended with code 1"):
            await sampler.generate("die 9", [LONG])


async def test_many_who_ask_a_busy_process_at_once_do_not_end_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as sampler:
        (pid,) = await sampler.encode("good", "x")
        os.kill(pid, signal.SIGSTOP)
        asked = [asyncio.create_task(sampler.encode("good", "x")) for _ in range(701)]
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert answers[:700] == 700 * [[pid]]
        assert isinstance(answers[700], SamplerBusy)
        assert "must have at most 400 requests waiting" in str(answers[700])


async def test_process_whose_connection_breaks_is_asked_again_and_lives(tmp_path: Path) -> None:
    async with opened(tmp_path) as sampler:
        (pid,) = await sampler.encode("drop 1", "x")
        (answer,) = await sampler.generate("drop 1", [LONG])
        assert answer.sequences[0].tokens == (11, 12, 13, 14, 15)
        assert await sampler.encode("drop 1", "x") == [pid]


async def test_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    async with opened(tmp_path) as sampler:
        with pytest.raises(SamplerUnavailable, match="started: base_model must be better"):
            await sampler.generate("refuse", [LONG])
        with pytest.raises(SamplingRefused, match="must be one of the service's, got 'other'"):
            await sampler.generate("other", [LONG])


async def test_idle_process_ends_and_another_one_comes(tmp_path: Path) -> None:
    async with opened(tmp_path, idle_s=0.05) as sampler:
        (first,) = await sampler.encode("good", "x")
        (child,) = sampler._children.values()
        assert await child.ended() == 0
        assert await sampler.encode("good", "x") != [first]


class Endless:
    """A batcher of which each step tells each request one token, and no sequence ends."""

    words = SimpleNamespace(tokenizer=tiny_tokenizer(), max_positions=4)

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.told = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def request(self, prompt: Prompt, number: int, seed: int, tell: Tell) -> Request:
        if prompt.tokens == (666,):
            raise ValueError("tokens must be nicer, got 666")
        most = 0 if prompt.params.max_tokens == 0 else 9
        return Request(prompt=prompt, number=number, tell=tell, most_new=most, seed=seed)

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def step(self) -> None:
        self.requests = [one for one in self.requests if not one.is_cancelled]
        for request in self.requests:
            if request.prompt.tokens == (13,):
                raise RuntimeError("the device is lost")
            scores = None if request.most_new else Scores(logprobs=(None,))
            self.told += 1
            reason = "length" if request.prompt.tokens == (3,) and self.told == 3 else None
            piece = Piece(prompt=request.number, tokens=(5,), text="a", scores=scores)
            request.tell(replace(piece, stop_reason=reason))


class Served(NamedTuple):
    """A process that serves in a task."""

    socket: Path
    batcher: Endless
    task: asyncio.Task[None]


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    """Serves while somebody talks, and ends with the process that has started it."""
    batcher: Any = Endless()
    (reading, ordering), (hearing, writing) = os.pipe(), os.pipe()
    parent, child = LinePipe(hearing, ordering), LinePipe(reading, writing)
    task = asyncio.create_task(SamplingProcess(batcher, 60.0).run(folder / "a.sock", child))
    async with asyncio.timeout(HANG_S):
        while not parent.receive():
            await asyncio.sleep(0.001)
        yield Served(folder / "a.sock", batcher, task)
        parent.close()
        await asyncio.wait([task])
    assert not (folder / "a.sock").exists()


async def ask(socket: Path, message: Any) -> dict[str, Any]:
    """The first answer to a message."""
    reader, writer = await connect(socket)
    writer.write(message if isinstance(message, bytes) else to_line(message))
    answer: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    return answer


def sample(*tokens: int, **params: Any) -> dict[str, Any]:
    prompt = Prompt(tokens=tokens, params=SamplingParams(**params))
    return {"op": "generate", "prompts": [prompt_to_json(prompt)], "seed": 1}


async def test_wrong_requests_are_answered_with_sentences(tmp_path: Path) -> None:
    async with served(tmp_path) as found:
        for message, sentence in (
            (b"{\n", "Expecting"),
            ({"op": "dance"}, "op must be generate, encode or decode, got 'dance'"),
            ([], "op must be"),
            (sample(666), "tokens must be nicer"),
            ({"op": "generate", "prompts": [{"tokens": [1], "heat": 2}], "seed": 0}, "got heat"),
            ({"op": "generate", "prompts": [{"tokens": []}], "seed": 0}, "at least one token"),
            ({"op": "generate", "prompts": [3], "seed": 0}, "prompt must be an object"),
            ({"op": "generate"}, "prompts must be given"),
            ({"op": "encode", "text": "a" * 2000}, "at most 1024 characters, got 2002"),
            ({"op": "encode", "messages": [{"role": "nobody"}]}, r"messages[0].role must be"),
            ({"op": "decode", "tokens": [-1]}, "the request failed: OverflowError"),
        ):
            assert sentence in (await ask(found.socket, message))["error"]


async def test_texts_and_messages_become_tokens_and_back(tmp_path: Path) -> None:
    async with served(tmp_path) as found:
        text = await ask(found.socket, {"op": "encode", "text": "ab"})
        assert text["tokens"] == [1, *byte_ids("ab")]
        messages = [{"role": "user", "content": "ab"}]
        chat = await ask(found.socket, {"op": "encode", "messages": messages})
        assert chat["tokens"] == [1, 4, *byte_ids("ab"), 6, 5]
        assert await ask(found.socket, {"op": "decode", "tokens": chat["tokens"]}) == {
            "text": "<s><|user|>ab<|end|><|assistant|>"
        }
        each = await ask(found.socket, {"op": "decode", "tokens": byte_ids("ab"), "each": True})
        assert each == {"texts": ["a", "b"]}


@pytest.mark.parametrize(("whole", "tokens"), [(True, [[5, 5, 5]]), (False, [[5], [5], [5]])])
async def test_sequences_come_whole_or_as_they_grow(
    tmp_path: Path, whole: bool, tokens: list[list[int]]
) -> None:
    async with served(tmp_path) as found:
        reader, writer = await connect(found.socket)
        writer.write(to_line(sample(3) | {"whole": whole}))
        answers = [json.loads(line) async for line in reader]
        writer.close()
    assert [answer["piece"]["tokens"] for answer in answers[:-1]] == tokens
    assert "".join(answer["piece"]["text"] for answer in answers[:-1]) == "aaa"
    assert (answers[-2]["piece"]["stop_reason"], answers[-1]) == ("length", {"done": True})


async def test_closed_connection_takes_the_request_back(tmp_path: Path) -> None:
    async with served(tmp_path) as found:
        assert (await ask(found.socket, sample(1)))["piece"]["tokens"] == [5]
        while found.batcher.requests:
            await asyncio.sleep(0.001)
        assert "piece" in await ask(found.socket, sample(1))


async def test_scores_alone_end_a_request(tmp_path: Path) -> None:
    async with served(tmp_path) as found:
        reader, writer = await connect(found.socket)
        writer.write(to_line(sample(1, max_tokens=0)))
        lines = [json.loads(line) async for line in reader]
        assert [list(line) for line in lines] == [["piece"], ["done"]]
        writer.close()


async def test_step_that_fails_ends_the_process(tmp_path: Path) -> None:
    async with served(tmp_path) as found:
        _, writer = await connect(found.socket)
        writer.write(to_line(sample(13)))
        with pytest.raises(RuntimeError, match="the device is lost"):
            await found.task
        assert not found.socket.exists()
        writer.close()
