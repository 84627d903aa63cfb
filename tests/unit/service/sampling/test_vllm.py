"""vLLM's server as a sampler, against a stand-in that speaks its documented wire."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.fake_vllm import make_app
from tests.helpers.http_service import listening
from tests.helpers.launch import HANG_S
from tests.helpers.tiny_tokenizer import (
    NO_CALLS_TEMPLATE,
    TOOL,
    TOOLS_TEMPLATE,
    save_tiny_tokenizer,
)
from tlora_megatron.runtime.sampling.values import Answer, Prompt, SamplingParams, TokenLogprob
from tlora_megatron.service.home import Home
from tlora_megatron.service.sampling.sampler import (
    SamplerAway,
    SamplerBusy,
    SamplerUnavailable,
    SamplingRefused,
)
from tlora_megatron.service.sampling.vllm_door import Door, NamedAdapter
from tlora_megatron.service.sampling.vllm_probe import (
    TEXT,
    BaseScores,
    Probe,
    ProbeSettings,
    dtype_of_logits,
    write_scores,
)
from tlora_megatron.service.sampling.vllm_sampler import VllmSampler
from tlora_megatron.service.sampling.vllm_server import GUARD, Server, VllmSettings
from tlora_megatron.service.supervisor import Child
from tlora_megatron.training.data.tokenize import encode_prompt

FAKE = (sys.executable, "-m", "tests.helpers.fake_vllm")
CALL = {"id": "c", "function": {"name": "get_weather", "arguments": {}}}

pytestmark = pytest.mark.anyio

Log = list[tuple[str, str]]


@pytest.fixture
def log() -> Log:
    return []


@pytest.fixture
def address(log: Log) -> Iterator[str]:
    with listening(make_app("base", "key", log)) as address:
        yield address


@asynccontextmanager
async def opened(folder: Path, *addresses: str, **settings: Any) -> AsyncIterator[VllmSampler]:
    """A sampler over servers that run."""
    running = [Server(address, "key") for address in addresses]
    known = VllmSettings(**{"most_rank": None, "patience_s": 0.0, **settings})
    sampler = VllmSampler(folder, {}.__getitem__, known, running)
    try:
        yield sampler
    finally:
        await sampler.close()


def adapter(folder: Path) -> str:
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text("x")
    return str(folder)


async def test_prompts_with_different_adapters_in_one_call(
    tmp_path: Path, address: str, log: Log
) -> None:
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two")
    async with opened(tmp_path, address) as sampler:
        params = SamplingParams(max_tokens=3, temperature=0.0, top_logprobs=2, top_k=5)
        prompts = [
            Prompt(tokens=(40,), params=params, num_samples=2),
            Prompt(tokens=(60,), adapter=one, params=params),
            Prompt(tokens=(70,), adapter=two, params=SamplingParams(max_tokens=2, stop=("x",))),
        ]
        answers = await sampler.generate("base", prompts)
        assert [[s.tokens for s in answer.sequences] for answer in answers] == [
            [(41, 42, 43), (41, 42, 43)], [(61, 62, 63)], [(71, 72)],
        ]  # fmt: skip
        first = answers[0].sequences[0]
        assert (first.text, first.logprobs) == (")*+", (-1.0, -2.0, -3.0))
        assert first.top_logprobs[0] == (TokenLogprob(7, -0.5), TokenLogprob(8, -0.5))
        assert (first.stop_reason, first.stopped_by) == ("length", None)
        last = answers[2].sequences[0]
        assert (last.stop_reason, last.stopped_by) == ("stop", "x")
        await sampler.generate("base", prompts[1:])
    assert sorted(log)[-2:] == [("load", one), ("load", two)]
    assert log.count(("complete", one)) == 2


async def test_prompts_are_scored(tmp_path: Path, address: str) -> None:
    async with opened(tmp_path, address) as sampler:
        scored = Prompt(tokens=(1, 2, 3), params=SamplingParams(max_tokens=0), prompt_logprobs=True)
        beside = Prompt(tokens=(1, 2), params=SamplingParams(max_tokens=2), top_prompt_logprobs=1)
        first, second = await sampler.generate("base", [scored, beside])
        assert first.prompt_logprobs == (None, -3.0, -3.0)
        assert not first.sequences
        assert second.prompt_logprobs is None
        assert second.top_prompt_logprobs == (None, (TokenLogprob(5, -1.0),))
        assert second.sequences[0].tokens == (3, 4)


async def test_texts(tmp_path: Path, address: str) -> None:
    async with opened(tmp_path, address) as sampler:
        assert await sampler.encode("base", "ab") == [97, 98]
        assert await sampler.decode("base", [97, 98]) == "ab"
        assert await sampler.token_texts("base", [97, 98]) == ["a", "b"]


async def test_chats_are_written_as_training_writes_them(tmp_path: Path) -> None:
    tokenizer = save_tiny_tokenizer(tmp_path / "base", chat_template=NO_CALLS_TEMPLATE)
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    bases = {"base": {"path": str(tmp_path / "base")}, "none": {"path": str(tmp_path)}}
    sampler = VllmSampler(tmp_path, bases.__getitem__)
    for template in (None, TOOLS_TEMPLATE):
        expected = encode_prompt(tokenizer, chat, template)
        assert await sampler.encode("base", chat, template) == expected
    chat["messages"] += [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    with pytest.raises(SamplingRefused, match="must be written by the chat template"):
        await sampler.encode("base", chat)
    with pytest.raises(SamplerUnavailable, match="base_model must hold a tokenizer"):
        await sampler.encode("none", chat)


async def test_old_adapters_leave_and_new_files_are_new_adapters(
    tmp_path: Path, address: str, log: Log
) -> None:
    folders = [adapter(tmp_path / name) for name in "abc"]
    async with opened(tmp_path, address, adapters=2) as sampler:
        for folder in (*folders, folders[2]):
            await sampler.generate("base", [Prompt(tokens=(1,), adapter=folder)])
    os.utime(f"{folders[2]}/adapter_config.json", (1, 1))
    async with opened(tmp_path, address, adapters=2) as sampler:  # another process of HTTP
        for folder in folders[1:]:
            await sampler.generate("base", [Prompt(tokens=(1,), adapter=folder)])
    changes = [one for one in log if one[0] in ("load", "unload")]
    loads, unloads = ([(what, folder) for folder in folders] for what in ("load", "unload"))
    assert changes == [*loads[:2], unloads[0], loads[2], unloads[2], loads[2]]


async def test_a_server_that_was_started_anew_gets_adapters_again(tmp_path: Path, log: Log) -> None:
    app, prompt = make_app("base", "key", log), Prompt(tokens=(1,), adapter=adapter(tmp_path / "a"))
    with listening(app) as address:
        async with opened(tmp_path, address, patience_s=HANG_S) as sampler:
            for is_dead in (False, True):
                app.state.adapters.is_dead = is_dead
                asked = asyncio.create_task(sampler.generate("base", [prompt]))
                while is_dead and log.count(("health", "")) < 3:
                    await asyncio.sleep(0.01)
                app.state.adapters.is_dead = False
                assert (await asked)[0].sequences[0].tokens == (2, 3, 4, 5)
                app.state.adapters.folders.clear()
    assert len([one for one in log if one[0] == "load"]) == 2


async def test_requests_go_where_the_adapter_is_and_to_who_lives(tmp_path: Path, log: Log) -> None:
    prompt = Prompt(tokens=(1,), adapter=adapter(tmp_path / "a"))
    with listening(make_app("base", "key", log)) as one, listening(make_app("base", "key")) as two:
        async with opened(tmp_path, "http://127.0.0.1:9", one, two, patience_s=HANG_S) as sampler:
            for count in (1, 4):
                await asyncio.gather(*(sampler.generate("base", [prompt]) for _ in range(count)))
            assert log.count(("complete", prompt.adapter)) == 5
            many = replace(prompt, num_samples=20)
            await asyncio.gather(*(sampler.generate("base", [many]) for _ in range(2)))
            assert log.count(("complete", prompt.adapter)) == 6


async def test_a_server_samples_once_before_it_takes_part(tmp_path: Path, repo: Path) -> None:
    """With an adapter of the base, while a warm one answers."""
    logs: list[Log] = [[], []]
    apps = [make_app("base", "key", log) for log in logs]
    section = {"path": str(repo / "configs/quickstart/base"), "dtype": "bfloat16"}
    prompt = Prompt(tokens=(1,), adapter=adapter(tmp_path / "a"))
    with listening(apps[0]) as one, listening(apps[1]) as two:
        running = [Server(address, "key") for address in (one, two)]
        sampler = VllmSampler(tmp_path, {"base": section}.__getitem__, running=running)
        first, second = sampler._running
        await sampler.generate("base", [prompt])
        assert (first.is_warm, second.is_warm) == (True, False)
        while not second.is_warm:
            await sampler.generate("base", [prompt])
        await sampler.close()
    (load,) = (what[1] for what in logs[1] if what[0] == "load")
    assert ("complete", load) in logs[1]
    assert not any(what[1] == load for what in logs[0])
    config = json.loads(Path(load, "adapter_config.json").read_text())
    shapes = {name: list(tensor.shape) for name, tensor in load_file(
        Path(load, "adapter_model.safetensors")).items()}  # fmt: skip
    path = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    assert shapes == {f"{path}A.weight": [1, 128], f"{path}B.weight": [128, 1]}
    assert config["target_modules"] == ["q_proj"]


async def test_no_more_adapters_are_used_than_there_are_slots(tmp_path: Path, address: str) -> None:
    one, two = (NamedAdapter.of(adapter(tmp_path / name)) for name in "ab")
    door = Door(Server(address, "key"), slots=1, most_rank=None)

    async def use(adapter: NamedAdapter) -> frozenset[str]:
        async with door.lease(adapter, 1):
            return await door.held()

    async with door.lease(one, 1):
        waiting = [asyncio.create_task(use(adapter)) for adapter in (two, one)]
        while door.cost(None) < 3 or await door.held() != {one.name}:
            await asyncio.sleep(0)
        assert not any(task.done() for task in waiting), "they take turns"
    assert await asyncio.gather(*waiting) == [{two.name}, {one.name}]
    await door.close()


async def test_refusals(tmp_path: Path, address: str) -> None:
    async with opened(tmp_path, address) as sampler:
        with pytest.raises(SamplingRefused, match="255 is out of vocabulary"):
            await sampler.generate("base", [Prompt(tokens=(255,))])
        with pytest.raises(SamplingRefused, match="does not exist"):
            await sampler.generate("other", [Prompt(tokens=(1,))])
        with pytest.raises(SamplingRefused, match="adapter must be a folder with"):
            await sampler.generate("base", [Prompt(tokens=(1,), adapter="/nowhere")])
        high = {"r": 128, "target_modules": ["q_proj"]}
        Path(adapter(tmp_path / "high"), "adapter_config.json").write_text(json.dumps(high))
        with pytest.raises(SamplingRefused, match=r"vLLM takes, got rank 128 on q_proj: .*rank 64"):
            await sampler.generate("base", [Prompt(tokens=(1,), adapter=str(tmp_path / "high"))])
    async with opened(tmp_path, address, most_rank=64, most_waiting=1) as sampler:
        with pytest.raises(SamplingRefused, match="at most rank 64, vLLM's --max-lora-rank, got"):
            await sampler.generate("base", [Prompt(tokens=(1,), adapter=str(tmp_path / "high"))])
        with pytest.raises(SamplerBusy, match="at most 1 prompts waiting"):
            await asyncio.gather(*(sampler.generate("base", [Prompt(tokens=(1,))]) for _ in "ab"))
    async with opened(tmp_path, "http://127.0.0.1:9") as sampler:
        with pytest.raises(SamplerAway, match="vLLM does not answer for base"):
            await sampler.generate("base", [Prompt(tokens=(1,))])


async def test_server_is_started_for_a_base_and_again_after_its_death(tmp_path: Path) -> None:
    bases = {
        "base": {"path": "base", "dtype": "bfloat16"},
        "broken": {"path": "broken", "dtype": "bfloat16"},
        "random": {"config": "x", "dtype": "bfloat16"},
    }
    settings = VllmSettings(command=FAKE)
    sampler = VllmSampler(tmp_path, bases.__getitem__, settings)
    asked = (sampler.encode("base", "a") for _ in range(3))
    assert await asyncio.gather(*asked) == [[97]] * 3
    (started,) = sampler._started.values()
    guard = started.result().server.child
    (server,) = psutil.Process(guard.pid if guard else 0).children()
    server.kill()
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


def test_vllm_and_all_that_it_starts_end_with_us(tmp_path: Path) -> None:
    """And the next one waits until then."""
    words = (*GUARD, str(tmp_path / "lock"), "sh", "-c", "sleep 600 & echo $!; wait")
    guards = [Child(words, log=tmp_path / "log", wire="stdin") for _ in range(2)]
    for count in (1, 2):
        while len(pids := (tmp_path / "log").read_text().split()) < count:
            time.sleep(0.01)
        (guard,) = [one for one in guards if psutil.Process(one.pid).children()]
        guards.remove(guard)
        sleeping = psutil.Process(int(pids[-1]))
        guard.pipe.hang_up()
        assert guard.wait() == 0
        sleeping.wait(HANG_S)
        guard.close()


DTYPES = ("float32", "float16", "bfloat16")


def test_too_little_shows_nothing() -> None:
    assert dtype_of_logits([]) is None
    assert dtype_of_logits([[-1.0, -2.0]]) is None
    assert dtype_of_logits([[-3.0 - 0.01 * index for index in range(20)]]) is None


class Scored(NamedTuple):
    """A copy of the quickstart's base in some dtype."""

    tokens: list[int]
    logprobs: list[float]
    """of all tokens but the first"""
    top: list[list[tuple[int, float]]]


@pytest.fixture(scope="module")
def copies(repo: Path) -> Mapping[str, Scored]:
    """By dtype; `int4`: bfloat16 with coarse weights."""
    base = repo / "configs/quickstart/base"
    tokens = AutoTokenizer.from_pretrained(base).encode(TEXT)[:64]
    found = {name: _scored(base, tokens, name) for name in DTYPES}
    return {**found, "int4": _scored(base, tokens, "bfloat16", levels=7)}


@torch.no_grad()
def _scored(base: Path, tokens: Sequence[int], dtype: str, levels: int = 0) -> Scored:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)).eval()
    for name, weight in model.named_parameters():
        if levels and weight.ndim == 2 and "layers" in name:
            unit = weight.abs().amax(1, keepdim=True) / levels
            weight.copy_((weight / unit).round() * unit)
    logits_TV = model(input_ids=torch.tensor([tokens])).logits[0, :-1].float()
    scores_TV = torch.log_softmax(logits_TV, dim=-1)
    own = scores_TV.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    values, indices = scores_TV.topk(20)
    rows = zip(indices.tolist(), values.tolist(), strict=True)
    return Scored(list(tokens), own, [list(zip(*row, strict=True)) for row in rows])


class Case:
    """A service with a base, before a server with a copy of it."""

    def __init__(self, folder: Path, copies: Mapping[str, Scored]) -> None:
        self.home, self.copies = Home.open(folder / "service"), copies
        self.said: list[str] = []
        self.looks = 0

    def base(self, dtype: str, **more: Any) -> dict[str, Any]:
        return {"path": None, "dtype": dtype, "quantization": None, **more}

    def train(self, dtype: str) -> None:
        """A gang opens the base."""
        own = self.copies[dtype]
        scores = BaseScores(tokens=tuple(own.tokens), logprobs=tuple(own.logprobs))
        write_scores(self.home, self.base(dtype), scores)

    def probe(self, copy: str, told: Mapping[str, Any] = {}, **settings: Any) -> Probe:
        server = self.copies[copy]

        async def generate(base: str, prompt: Prompt) -> Answer:
            self.looks += 1
            top = [tuple(TokenLogprob(*pair) for pair in row) for row in server.top]
            logprobs = (None, *server.logprobs)
            return Answer(sequences=(), prompt_logprobs=logprobs, top_prompt_logprobs=(None, *top))

        async def encode(base: str, text: str) -> list[int]:
            return server.tokens

        async def get(path: str) -> Mapping[str, Any]:
            return told if path.startswith("/server_info") else {}

        shown = ProbeSettings(home=self.home, say=self.said.append, **settings)
        return Probe(shown, generate, encode, get)


@pytest.fixture
def case(tmp_path: Path, copies: Mapping[str, Scored]) -> Case:
    return Case(tmp_path, copies)


@pytest.mark.parametrize(
    ("dtype", "copy"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float32", "bfloat16"),
        ("bfloat16", "float16"),
    ],
)
def test_a_server_in_another_dtype_is_refused(case: Case, dtype: str, copy: str) -> None:
    probe, base = case.probe(copy), case.base(dtype)
    case.train(dtype)
    if copy == dtype:
        asyncio.run(probe.check("base", base))
        assert f"{dtype} by its logits" in case.said[0]
        return
    with pytest.raises(SamplingRefused, match=f"dtype must be {dtype}, got {copy} by its logits"):
        asyncio.run(probe.check("base", base))
    asyncio.run(case.probe(copy, may_differ=True).check("base", base))
    assert "unlike the base that trains" in case.said[-1]


def test_coarser_weights_are_refused_by_the_gap(case: Case) -> None:
    base = case.base("bfloat16")
    probe = case.probe("int4")
    asyncio.run(probe.check("base", base))
    assert "not compared with the trainer's log-probabilities" in case.said[0]
    case.train("bfloat16")
    for _ in range(2):
        with pytest.raises(SamplingRefused, match=r"must be within 0.05 of the trainer's"):
            asyncio.run(probe.check("base", base))
    assert case.looks == 2, "once before there were scores, once behind"


def test_what_a_server_says_of_itself_counts(case: Case) -> None:
    told = {"model_config": {"dtype": "torch.bfloat16", "quantization": "fp8"}}
    probe = case.probe("bfloat16", {"vllm_config": told})
    with pytest.raises(SamplingRefused, match="quantisation must be none, got fp8"):
        asyncio.run(probe.check("base", case.base("bfloat16")))
    asyncio.run(probe.check("base", case.base("bfloat16", quantization="fp8")))
    told["model_config"]["dtype"] = "torch.float16"
    with pytest.raises(SamplingRefused, match="dtype must be bfloat16, got float16 by its words"):
        asyncio.run(case.probe("bfloat16", {"vllm_config": told}).check("b", case.base("bfloat16")))


async def test_sampler_looks_before_it_samples(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    bases = {"base": {"path": str(tmp_path), "dtype": "bfloat16", "quantization": None}}
    home = Home.open(tmp_path / "service")
    told = {"dtype": "torch.float32", "quantization": None}
    with listening(make_app("base", "key", told=told)) as address:
        for may_differ in (False, True):
            probe = ProbeSettings(home=home, may_differ=may_differ)
            running = [Server(address, "key")]
            sampler = VllmSampler(tmp_path, bases.__getitem__, running=running, probe=probe)
            prompt = Prompt(tokens=(1,))
            if may_differ:
                (answer,) = await sampler.generate("base", [prompt])
                assert answer.sequences[0].tokens == (2, 3, 4, 5)
            else:
                with pytest.raises(SamplingRefused, match="--sampler-may-differ"):
                    await sampler.generate("base", [prompt])
            await sampler.close()
