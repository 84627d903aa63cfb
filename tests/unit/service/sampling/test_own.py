"""Processes of our own are started when asked, again when they die, and end by themselves."""

from __future__ import annotations

import asyncio
import stat
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import HANG_S
from tlora_megatron.runtime.sampling.values import Prompt, SamplingParams
from tlora_megatron.service.sampling.own import OwnSampler, OwnSettings
from tlora_megatron.service.sampling.sampler import SamplerUnavailable, SamplingRefused

FAKE = (sys.executable, "-m", "tests.helpers.fake_sampler")
LONG = Prompt(tokens=(1, 10), params=SamplingParams(max_tokens=5))


@asynccontextmanager
async def opened(folder: Path, idle_s: float = 60.0) -> AsyncIterator[OwnSampler]:
    """A sampler whose bases are told by their names."""
    bases = {name: {"path": name} for name in ("good", "refuse", "die 1", "die 9")}
    settings = OwnSettings(idle_s=idle_s, command=FAKE)
    sampler = OwnSampler(folder / "deep" / ("x" * 90), bases.__getitem__, settings)
    try:
        yield sampler
    finally:
        await sampler.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, HANG_S))


def test_one_process_serves_all_who_ask_at_once(tmp_path: Path) -> None:
    async def work() -> None:
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

    run(work())


def test_request_is_asked_once_more_and_its_pieces_are_told_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as sampler:
            tokens = [piece.tokens[0] async for piece in sampler.stream("die 1", [LONG])]
            assert tokens == [11, 12, 13, 14, 15]
            with pytest.raises(SamplerUnavailable, match="the sampler of die 9 has ended"):
                await sampler.generate("die 9", [LONG])

    run(work())


def test_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as sampler:
            with pytest.raises(SamplerUnavailable, match="started: base_model must be better"):
                await sampler.generate("refuse", [LONG])
            with pytest.raises(SamplingRefused, match="must be one of the service's, got 'other'"):
                await sampler.generate("other", [LONG])

    run(work())


def test_idle_process_ends_and_another_one_comes(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path, idle_s=0.05) as sampler:
            (first,) = await sampler.encode("good", "x")
            (child,) = sampler._children.values()
            assert await child.ended() == 0
            assert await sampler.encode("good", "x") != [first]

    run(work())
