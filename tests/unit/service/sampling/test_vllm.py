"""vLLM's server as a sampler, against a stand-in that speaks its documented wire."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_vllm import make_app
from tests.helpers.http_service import listening
from tlora_megatron.runtime.sampling.values import Prompt, SamplingParams, TokenLogprob
from tlora_megatron.service.sampling.sampler import SamplerUnavailable, SamplingRefused
from tlora_megatron.service.sampling.vllm_sampler import VllmSampler
from tlora_megatron.service.sampling.vllm_server import Server, VllmSettings

FAKE = (sys.executable, "-m", "tests.helpers.fake_vllm")
Log = list[tuple[str, str]]


@pytest.fixture
def log() -> Log:
    return []


@pytest.fixture
def address(log: Log) -> Iterator[str]:
    with listening(make_app("base", "key", log)) as address:
        yield address


@asynccontextmanager
async def opened(folder: Path, address: str, adapters: int = 8) -> AsyncIterator[VllmSampler]:
    """A sampler over a server that runs."""
    settings, bases = VllmSettings(adapters=adapters), dict[str, Any]()
    sampler = VllmSampler(folder, bases.__getitem__, settings, Server(address, "key"))
    try:
        yield sampler
    finally:
        await sampler.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def adapter(folder: Path) -> str:
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text("x")
    return str(folder)


def test_prompts_with_different_adapters_in_one_call(
    tmp_path: Path, address: str, log: Log
) -> None:
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two")

    async def work() -> None:
        async with opened(tmp_path, address) as sampler:
            params = SamplingParams(max_tokens=3, temperature=0.0, top_logprobs=2, top_k=5)
            prompts = [
                Prompt(tokens=(40,), params=params, num_samples=2),
                Prompt(tokens=(60,), adapter=one, params=params),
                Prompt(tokens=(70,), adapter=two, params=SamplingParams(max_tokens=2, stop=("x",))),
            ]
            answers = await sampler.generate("base", prompts)
            assert [[s.tokens for s in answer.sequences] for answer in answers] == [
                [(41, 42, 43), (42, 43, 44)], [(61, 62, 63)], [(71, 72)],
            ]  # fmt: skip
            first = answers[0].sequences[0]
            assert (first.text, first.logprobs) == (")*+", (-1.0, -2.0, -3.0))
            assert first.top_logprobs[0] == (TokenLogprob(7, -0.5), TokenLogprob(8, -0.5))
            assert (first.stop_reason, first.stopped_by) == ("length", None)
            last = answers[2].sequences[0]
            assert (last.stop_reason, last.stopped_by) == ("stop", "x")
            await sampler.generate("base", prompts[1:])

    run(work())
    assert sorted(log)[-2:] == [("load", one), ("load", two)]
    assert log.count(("complete", one)) == 2


def test_prompts_are_scored(tmp_path: Path, address: str) -> None:
    async def work() -> None:
        async with opened(tmp_path, address) as sampler:
            scored = Prompt(
                tokens=(1, 2, 3), params=SamplingParams(max_tokens=0), prompt_logprobs=True
            )
            beside = Prompt(
                tokens=(1, 2), params=SamplingParams(max_tokens=2), top_prompt_logprobs=1
            )
            first, second = await sampler.generate("base", [scored, beside])
            assert first.prompt_logprobs == (None, -3.0, -3.0)
            assert not first.sequences
            assert second.prompt_logprobs is None
            assert second.top_prompt_logprobs == (None, (TokenLogprob(5, -1.0),))
            assert second.sequences[0].tokens == (3, 4)

    run(work())


def test_texts(tmp_path: Path, address: str) -> None:
    async def work() -> None:
        async with opened(tmp_path, address) as sampler:
            assert await sampler.encode("base", "ab") == [97, 98]
            assert await sampler.decode("base", [97, 98]) == "ab"
            assert await sampler.token_texts("base", [97, 98]) == ["a", "b"]
            chat = await sampler.encode("base", [{"role": "user", "content": "x"}])
            assert bytes(chat).startswith(b"<chat>")

    run(work())


def test_old_adapters_leave_and_new_files_are_new_adapters(
    tmp_path: Path, address: str, log: Log
) -> None:
    folders = [adapter(tmp_path / name) for name in "abc"]

    async def work() -> None:
        async with opened(tmp_path, address, adapters=2) as sampler:
            for folder in (*folders, folders[2]):
                await sampler.generate("base", [Prompt(tokens=(1,), adapter=folder)])
            os.utime(f"{folders[2]}/adapter_config.json", (1, 1))
            await sampler.generate("base", [Prompt(tokens=(1,), adapter=folders[2])])

    run(work())
    changes = [one for one in log if one[0] != "complete"]
    loads = [("load", folder) for folder in folders]
    assert changes == [*loads, ("unload", folders[0]), loads[2], ("unload", folders[1])]


def test_refusals(tmp_path: Path, address: str) -> None:
    async def work() -> None:
        async with opened(tmp_path, address) as sampler:
            with pytest.raises(SamplingRefused, match="255 is out of vocabulary"):
                await sampler.generate("base", [Prompt(tokens=(255,))])
            with pytest.raises(SamplingRefused, match="does not exist"):
                await sampler.generate("other", [Prompt(tokens=(1,))])
            with pytest.raises(SamplingRefused, match="adapter must be a folder with"):
                await sampler.generate("base", [Prompt(tokens=(1,), adapter="/nowhere")])
            with pytest.raises(SamplingRefused, match=r"messages\[0\]'s keys must be"):
                await sampler.encode("base", [{"role": "user", "content": "x", "nmae": "bob"}])
        async with opened(tmp_path, "http://127.0.0.1:9") as sampler:
            with pytest.raises(SamplerUnavailable, match="vLLM does not answer for base"):
                await sampler.generate("base", [Prompt(tokens=(1,))])

    run(work())


def test_server_is_started_for_a_base_and_again_after_its_death(tmp_path: Path) -> None:
    bases = {
        "base": {"path": "base", "dtype": "bfloat16"},
        "broken": {"path": "broken", "dtype": "bfloat16"},
        "random": {"config": "x", "dtype": "bfloat16"},
    }

    async def work() -> None:
        settings = VllmSettings(command=FAKE)
        sampler = VllmSampler(tmp_path, bases.__getitem__, settings)
        asked = (sampler.encode("base", "a") for _ in range(3))
        assert await asyncio.gather(*asked) == [[97]] * 3
        (server,) = sampler._servers.values()
        assert server.child is not None
        server.child.kill()
        assert await sampler.encode("base", "a") == [97]
        with pytest.raises(SamplerUnavailable, match="the engine core has failed"):
            await sampler.encode("broken", "a")
        with pytest.raises(SamplingRefused, match="a folder of weights as they are for vLLM"):
            await sampler.encode("random", "a")
        await sampler.close()
        sampler = VllmSampler(tmp_path, bases.__getitem__, VllmSettings(command=("no-vllm",)))
        with pytest.raises(SamplerUnavailable, match="pip install vllm"):
            await sampler.encode("base", "a")
        await sampler.close()

    run(work())
