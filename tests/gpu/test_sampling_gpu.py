"""On a GPU, sampling is as exact as its dtype: fp32 as on a CPU, bf16 as close as transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.sampling_case import Reference, greedy, opened, sample, write_adapters
from tests.helpers.tiny_models import GPU_SHAPE, make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tlora_megatron.runtime.sampling.batcher import Batcher
from tlora_megatron.runtime.sampling.values import Answer, Prompt, SamplingParams

pytestmark = pytest.mark.gpu


def make_prompts(folder: Path, dtype: torch.dtype) -> tuple[Path, list[Prompt]]:
    """A base, and prompts of several lengths for its adapters and for itself."""
    base = make_tiny_model(
        folder / "base", "qwen3", vocab_size=VOCAB_SIZE, dtype=dtype, **GPU_SHAPE
    )
    save_tiny_tokenizer(base)
    generator = torch.Generator().manual_seed(3)
    return base, [
        Prompt(
            tokens=(1, *torch.randint(8, 200, (length,), generator=generator).tolist()),
            adapter=adapter,
            prompt_logprobs=True,
        )
        for length in (3, 90, 31)
        for adapter in (None, *write_adapters(base, folder).values())
    ]


def scores(answer: Answer) -> torch.Tensor:
    """Log-probabilities of all tokens but the first."""
    assert answer.prompt_logprobs is not None
    return torch.tensor([*answer.prompt_logprobs[1:], *answer.sequences[0].logprobs])


def scored_without_a_past(batcher: Batcher, prompt: Prompt, answer: Answer) -> torch.Tensor:
    """The same from one forward over all tokens."""
    whole = replace(
        prompt,
        tokens=(*prompt.tokens, *answer.sequences[0].tokens),
        params=SamplingParams(max_tokens=0),
    )
    (found,) = sample(batcher, [whole])
    assert found.prompt_logprobs is not None
    return torch.tensor(found.prompt_logprobs[1:])


def root_mean_square(parts: list[torch.Tensor]) -> float:
    return float(torch.cat(parts).pow(2).mean().sqrt())


def test_fp32_gives_the_tokens_of_peft(tmp_path: Path) -> None:
    base, prompts = make_prompts(tmp_path, torch.float32)
    prompts = [greedy(prompt, 16) for prompt in prompts]
    with opened(base, "float32", adapters=2, step_tokens=64, cache_bytes=8 << 20) as batcher:
        answers = sample(batcher, prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            reference = Reference(base, prompt.adapter)
            tokens = list(answer.sequences[0].tokens)
            assert tokens == reference.generate(prompt.tokens, 16)
            expected = reference.logprobs((*prompt.tokens, *tokens))
            torch.testing.assert_close(scores(answer), expected, atol=1e-4, rtol=1e-5)


def test_bf16_is_as_close_to_fp32_as_transformers_is(tmp_path: Path) -> None:
    base, prompts = make_prompts(tmp_path, torch.bfloat16)
    prompts = [greedy(prompt, 24) for prompt in prompts]
    with opened(base, "bfloat16", adapters=2, step_tokens=64, cache_bytes=8 << 20) as batcher:
        answers = sample(batcher, prompts)
        plain = [
            scored_without_a_past(batcher, prompt, answer)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    ours, theirs, without = [], [], []
    for prompt, answer, alone in zip(prompts, answers, plain, strict=True):
        tokens = (*prompt.tokens, *answer.sequences[0].tokens)
        exact = Reference(base, prompt.adapter).logprobs(tokens)
        ours.append(scores(answer) - exact)
        without.append(alone - exact)
        theirs.append(Reference(base, prompt.adapter, torch.bfloat16).logprobs(tokens) - exact)
    error, plain_error, other = map(root_mean_square, (ours, without, theirs))
    print(f"errors: ours {error:.4f}, without a past {plain_error:.4f}, transformers {other:.4f}")
    assert error < 1.5 * other + 1e-3
    assert error < 1.5 * plain_error + 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps_are_those_of_the_kernels_one_by_one(tmp_path: Path, dtype: str) -> None:
    base, prompts = make_prompts(tmp_path, getattr(torch, dtype))
    prompts = [greedy(prompt, 12) for prompt in prompts]
    with opened(base, dtype, adapters=3, cache_bytes=8 << 20) as batcher:
        decoder: Any = batcher._model.decoder
        answers = sample(batcher, prompts)
        assert 16 in decoder.graphs, "12 sequences are computed as 16"
        decoder.graphs.clear()
        decoder.records = False
        assert sample(batcher, prompts) == answers
        batcher._model.decoder = None
        others = sample(batcher, prompts)
    # Near ties part bf16's sequences: their first tokens, by the same steps, are compared.
    count, bound = (12, 1e-4) if dtype == "float32" else (2, 0.3)
    for found, other in zip(answers, others, strict=True):
        ours, theirs = found.sequences[0], other.sequences[0]
        if dtype == "float32" or ours.tokens[:count] == theirs.tokens[:count]:
            assert ours.tokens[:count] == theirs.tokens[:count]
            assert ours.logprobs[:count] == pytest.approx(theirs.logprobs[:count], abs=bound)


def test_recorded_steps_have_the_weights_of_a_version_that_takes_a_place(tmp_path: Path) -> None:
    base, (prompt, *_) = make_prompts(tmp_path, torch.float32)
    folders = [write_adapters(base, tmp_path / f"{seed}", seed)["attention"] for seed in (20, 30)]
    graphs = []
    with opened(base, "float32", adapters=1, cache_bytes=8 << 20) as batcher:
        decoder: Any = batcher._model.decoder
        for version in (*folders, folders[0]):
            (answer,) = sample(batcher, [greedy(replace(prompt, adapter=version), 16)])
            reference = Reference(base, version).generate(prompt.tokens, 16)
            assert list(answer.sequences[0].tokens) == reference
            graphs.append(decoder.graphs[1][0])
    assert graphs[0] is graphs[1] is graphs[2], "weights are read where they were"


def test_a_model_that_cannot_be_recorded_decodes_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, prompts = make_prompts(tmp_path, torch.float32)
    prompts = [greedy(prompt, 8) for prompt in prompts[:3]]
    with opened(base, "float32", adapters=3, cache_bytes=8 << 20) as batcher:
        decoder: Any = batcher._model.decoder
        expected = sample(batcher, prompts)
        decoder.graphs.clear()
        compute = decoder._compute

        def waits(*step: Any) -> torch.Tensor:
            hidden_TH = compute(*step)
            float(hidden_TH.sum())  # which a recording refuses
            return hidden_TH

        decoder._compute = waits
        assert sample(batcher, prompts) == expected
        assert not decoder.records
        assert "runs without CUDA graphs" in caplog.text


def test_samples_do_not_depend_on_neighbours_in_fp32(tmp_path: Path) -> None:
    base, prompts = make_prompts(tmp_path, torch.float32)
    params = SamplingParams(max_tokens=20, temperature=1.2, top_p=0.95, seed=4)
    mine = replace(prompts[5], params=params, num_samples=3)
    with opened(base, "float32", cache_bytes=8 << 20) as batcher:
        (alone,) = sample(batcher, [mine])
        beside = sample(batcher, [*prompts[:5], mine, *prompts[6:]])[5]
    assert [one.tokens for one in alone.sequences] == [one.tokens for one in beside.sequences]
