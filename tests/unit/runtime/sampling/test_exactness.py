"""Sampling is exact: Hugging Face's greedy tokens, and the log-probabilities of both models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.helpers.sampling_case import Reference, greedy, opened, sample, write_adapters
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tlora_megatron.integrations.megatron.key_cache import Growth
from tlora_megatron.runtime.sampling.batcher import Batcher
from tlora_megatron.runtime.sampling.values import Prompt, SamplingParams

TOLERANCE = 1e-5
"""Beside the last digit of fp32: the unlikeliest tokens have log-probabilities of -20."""


class Opened(NamedTuple):
    """A base that is opened, and adapters of it by name; None is the base alone."""

    base: Path
    batcher: Batcher
    adapters: dict[str | None, str | None]


@pytest.fixture(scope="module", params=["quickstart", "qwen3", "qwen2_moe", "qwen3_moe"])
def case(
    request: pytest.FixtureRequest, repo: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("sampling")
    base = repo / "configs" / "quickstart" / "base"
    if request.param != "quickstart":
        kind, tied = request.param, request.param == "qwen3"
        base = make_tiny_model(folder / "base", kind, tied=tied, vocab_size=VOCAB_SIZE)
        save_tiny_tokenizer(base)
    adapters: dict[str | None, str | None] = {None: None, **write_adapters(base, folder)}
    # Two adapters at a time: the third waits for room.
    with opened(base, adapters=2, step_tokens=48, cache_bytes=4 << 20) as batcher:
        yield Opened(base, batcher, adapters)


def prompts_of(case: Opened, count: int = 3) -> list[Prompt]:
    """Prompts of several lengths for every adapter; one is longer than a step."""
    generator = torch.Generator().manual_seed(7)
    lengths = [5, 70, 17][:count]
    drawn = [
        torch.randint(8, 200, (length,), generator=generator).tolist()
        for length in lengths
        for _ in case.adapters
    ]
    return [
        Prompt(
            tokens=(1, *tokens),
            adapter=adapter,
            prompt_logprobs=True,
            top_prompt_logprobs=2,
            targets=tuple((9, token) for token in tokens),
        )
        for tokens, adapter in zip(drawn, itertools.cycle(case.adapters.values()), strict=False)
    ]


def test_greedy_tokens_and_log_probabilities_are_those_of_peft(case: Opened) -> None:
    prompts = [greedy(prompt, 12) for prompt in prompts_of(case)]
    answers = sample(case.batcher, prompts)
    assert case.batcher._model.cache.num_free == case.batcher._model.cache.num_rows
    for adapter in case.adapters.values():
        reference = Reference(case.base, adapter)
        for prompt, answer in zip(prompts, answers, strict=True):
            if prompt.adapter != adapter:
                continue
            (found,) = answer.sequences
            assert list(found.tokens) == reference.generate(prompt.tokens, 12)
            expected = reference.logprobs((*prompt.tokens, *found.tokens))
            assert answer.prompt_logprobs is not None
            scored = torch.tensor([*answer.prompt_logprobs[1:], *found.logprobs])
            torch.testing.assert_close(scored, expected, atol=TOLERANCE, rtol=1e-6)
            assert [row[1] for row in answer.target_logprobs] == list(answer.prompt_logprobs[1:])
            assert answer.top_prompt_logprobs is not None
            tops = [top and len(top) for top in answer.top_prompt_logprobs]
            assert tops == [None, *[2] * (len(prompt.tokens) - 1)]


def test_tokens_do_not_depend_on_neighbours(case: Opened) -> None:
    params = SamplingParams(max_tokens=15, temperature=1.2, top_k=40, top_p=0.95, seed=11)
    mine = replace(prompts_of(case)[1], params=params, num_samples=2)
    others = [
        replace(prompt, params=SamplingParams(max_tokens=9, seed=i), num_samples=1 + i % 3)
        for i, prompt in enumerate(prompts_of(case))
    ]
    (alone,) = sample(case.batcher, [mine])
    beside = sample(case.batcher, [*others[:5], mine, *others[5:]])[5]
    assert [one.tokens for one in alone.sequences] == [one.tokens for one in beside.sequences]
    first, second = alone.sequences
    assert first.tokens != second.tokens


def test_hidden_states_do_not_come_from_a_former_holder_of_the_rows(case: Opened) -> None:
    prompt = greedy(prompts_of(case)[0], 8)
    cache = case.batcher._model.cache
    (before,) = sample(case.batcher, [prompt])
    rows = list(range(cache.num_rows))
    case.batcher._model.step(
        [Growth(slot=case.batcher._shelf.num_slots, past=0, tokens=(9,) * 40, rows=rows)],
        case.batcher._shelf.num_slots,
    )
    assert sample(case.batcher, [prompt]) == [before]
