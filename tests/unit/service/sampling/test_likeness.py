"""A server that holds a base otherwise than it is trained is seen, and refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.fake_vllm import make_app
from tests.helpers.http_service import listening
from tlora_megatron.runtime.sampling.values import Answer, Prompt, TokenLogprob
from tlora_megatron.service.home import Home
from tlora_megatron.service.sampling.sampler import SamplingRefused
from tlora_megatron.service.sampling.vllm_probe import (
    TEXT,
    BaseScores,
    Probe,
    ProbeSettings,
    dtype_of_logits,
    write_scores,
)
from tlora_megatron.service.sampling.vllm_sampler import VllmSampler
from tlora_megatron.service.sampling.vllm_server import Server

DTYPES = ("float32", "float16", "bfloat16")


def places(logits_TV: torch.Tensor) -> list[list[float]]:
    """The likeliest tokens' log-probabilities, as vLLM makes them: of logits that are cast."""
    return torch.log_softmax(logits_TV.float(), dim=-1).topk(20).values.tolist()


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (3.0, 8.0), (5.0, 40.0), (2.0, -10.0)])
def test_dtype_is_seen_in_logits(scale: float, offset: float) -> None:
    logits_TV = torch.randn(12, 4096, generator=torch.Generator().manual_seed(0)) * scale + offset
    seen = {name: dtype_of_logits(places(logits_TV.to(getattr(torch, name)))) for name in DTYPES}
    assert (seen["float32"], seen["bfloat16"]) == ("float32", "bfloat16")
    assert seen["float16"] in ("float16", "bfloat16")


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("copy", DTYPES)
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


def test_sampler_looks_before_it_samples(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    bases = {"base": {"path": str(tmp_path), "dtype": "bfloat16", "quantization": None}}
    home = Home.open(tmp_path / "service")
    told = {"dtype": "torch.float32", "quantization": None}

    async def work(address: str) -> None:
        for may_differ in (False, True):
            probe = ProbeSettings(home=home, may_differ=may_differ)
            server = Server(address, "key")
            sampler = VllmSampler(tmp_path, bases.__getitem__, running=server, probe=probe)
            prompt = Prompt(tokens=(1,))
            if may_differ:
                (answer,) = await sampler.generate("base", [prompt])
                assert answer.sequences[0].tokens == (2, 3, 4, 5)
            else:
                with pytest.raises(SamplingRefused, match="--sampler-may-differ"):
                    await sampler.generate("base", [prompt])
            await sampler.close()

    with listening(make_app("base", "key", told=told)) as address:
        asyncio.run(work(address))
