"""Tokens are chosen by one number each, from the sequence's own distribution."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tlora_megatron.runtime.sampling.tracks import Draws, choose, log_probabilities, top_of
from tlora_megatron.runtime.sampling.values import SamplingParams, TokenLogprob

PROBABILITIES = (0.1, 0.4, 0.2, 0.3)


class Numbers(Draws):
    """Draws that are known."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def next(self) -> float:
        return self._numbers.pop(0)


def choose_one(number: float, **params: float) -> int:
    """The token for a number; tokens lie in the order 1, 3, 2, 0."""
    logits = torch.tensor([PROBABILITIES]).log()
    return choose(logits, [SamplingParams(**params)], [Numbers(number)])[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "token"), [(0.0, 1), (0.39, 1), (0.41, 3), (0.69, 3), (0.71, 2), (0.91, 0)]
)
def test_number_is_looked_up_from_the_likeliest_on(number: float, token: int) -> None:
    assert choose_one(number) == token


def test_the_smallest_temperature_takes_the_likeliest_token() -> None:
    assert choose_one(1 - 1e-17, temperature=5e-324) == 1


def test_number_close_to_one_finds_a_token_that_is_kept() -> None:
    assert choose_one(1 - 1e-17, top_k=2) == 3
    assert choose_one(1 - 1e-17) == 0


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    assert {choose_one(i / 20, top_k=1) for i in range(20)} == {1}
    assert {choose_one(i / 20, top_k=3) for i in range(20)} == {1, 3, 2}
    assert {choose_one(i / 20, top_p=0.5) for i in range(20)} == {1, 3}
    assert {choose_one(i / 20, top_p=1e-9) for i in range(20)} == {1}
    # 0.4 of the 0.7 that the first two have is more than a half: one is enough.
    assert {choose_one(i / 20, top_k=2, top_p=0.5) for i in range(20)} == {1}


def test_temperature_sharpens_and_zero_is_the_likeliest() -> None:
    assert choose_one(0.99, temperature=0.01) == 1
    assert choose_one(0.26, temperature=100.0) == 3
    logits = torch.tensor([[1.0, 3.0, 3.0]])
    assert choose(logits, [SamplingParams(temperature=0.0)], [Numbers()]) == [1]


def test_rows_have_their_own_parameters_and_numbers() -> None:
    logits = torch.tensor([PROBABILITIES] * 3).log()
    params = [SamplingParams(top_k=1), SamplingParams(temperature=0.0), SamplingParams()]
    draws = [Numbers(0.99), Numbers(), Numbers(0.99)]
    assert choose(logits, params, draws) == [1, 1, 0]


def test_frequencies_are_the_probabilities() -> None:
    draws = [Draws(3, 0)]
    logits = torch.tensor([PROBABILITIES]).log()
    found = Counter(choose(logits, [SamplingParams()], draws)[0] for _ in range(4000))
    for token, expected in enumerate(PROBABILITIES):
        assert found[token] / 4000 == pytest.approx(expected, abs=0.03)


def test_draws_differ_by_seed_and_sample_alone() -> None:
    assert Draws(1, 2).next() == Draws(1, 2).next()
    assert len({Draws(seed, sample).next() for seed in range(5) for sample in range(5)}) == 25


def test_top_tokens_with_their_log_probabilities() -> None:
    logprobs = log_probabilities(torch.tensor([PROBABILITIES]).log())[0]
    top = top_of(logprobs, 2)
    assert [pair.token for pair in top] == [1, 3]
    assert top[0] == TokenLogprob(1, pytest.approx(-0.916291, abs=1e-5))
    assert len(top_of(logprobs, 9)) == 4
