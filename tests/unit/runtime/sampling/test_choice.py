"""Tokens are chosen by one number each; texts are cut before a stop text; adapters may go."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny_tokenizer import EOS_ID, byte_ids, tiny_tokenizer
from tlora_megatron.runtime.sampling import adapters
from tlora_megatron.runtime.sampling.tracks import choose, draws_of, log_probabilities, top_of
from tlora_megatron.runtime.sampling.values import (
    AdapterKey,
    SamplingParams,
    TextStream,
    TokenLogprob,
)

PROBABILITIES = (0.1, 0.4, 0.2, 0.3)


class Numbers:
    """Draws that are known."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def random(self) -> float:
        return self._numbers.pop(0)


def choose_one(number: float, **params: float) -> int:
    """The token for a number; tokens lie in the order 1, 3, 2, 0."""
    logits = torch.tensor([PROBABILITIES]).log()
    return choose(logits, [SamplingParams(**params)], [Numbers(number)]).item()  # type: ignore[arg-type]


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
    assert choose(logits, [SamplingParams(temperature=0.0)], [Numbers()]).tolist() == [1]


def test_rows_have_their_own_parameters_and_numbers() -> None:
    logits = torch.tensor([PROBABILITIES] * 3).log()
    params = [SamplingParams(top_k=1), SamplingParams(temperature=0.0), SamplingParams()]
    draws = [Numbers(0.99), Numbers(), Numbers(0.99)]
    assert choose(logits, params, draws).tolist() == [1, 1, 0]


def test_frequencies_are_the_probabilities() -> None:
    draws = [draws_of(3, 0)]
    logits = torch.tensor([PROBABILITIES]).log()
    found = Counter(choose(logits, [SamplingParams()], draws).item() for _ in range(4000))
    for token, expected in enumerate(PROBABILITIES):
        assert found[token] / 4000 == pytest.approx(expected, abs=0.03)


def test_draws_differ_by_seed_and_sample_alone() -> None:
    assert draws_of(1, 2).random() == draws_of(1, 2).random()
    assert len({draws_of(seed, sample).random() for seed in range(5) for sample in range(5)}) == 25


def test_top_tokens_with_their_log_probabilities() -> None:
    logprobs = log_probabilities(torch.tensor([PROBABILITIES]).log())[0]
    top = top_of(logprobs, 2)
    assert [pair.token for pair in top] == [1, 3]
    assert top[0] == TokenLogprob(1, pytest.approx(-0.916291, abs=1e-5))
    assert len(top_of(logprobs, 9)) == 4


TOKENIZER = tiny_tokenizer()


def grow(tokens: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    """The texts as they come, and the stop text that ended them."""
    stream, texts = TextStream(TOKENIZER, stops), []
    for token in tokens:
        grown = stream.add(token)
        texts.append(grown.text)
        if grown.stop is not None:
            return texts, grown.stop
    grown = stream.end()
    return [*texts, grown.text], grown.stop


def test_characters_of_several_bytes_come_whole() -> None:
    text = "aé€😀 b"
    texts, stop = grow(byte_ids(text))
    assert stop is None
    assert "".join(texts) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in texts)
    assert texts[:3] == ["a", "", "é"]


def test_special_tokens_have_no_text_and_broken_bytes_come_at_the_end() -> None:
    assert "".join(grow([*byte_ids("ab"), EOS_ID])[0]) == "ab"
    assert "".join(grow([*byte_ids("a"), byte_ids("€")[0]])[0]) == "a\N{REPLACEMENT CHARACTER}"


def test_pieces_are_those_of_decoding_all_tokens_each_time() -> None:
    draw = random.Random(0)
    euro, grin = byte_ids("€"), byte_ids("😀")
    parts = [byte_ids("a"), byte_ids("é"), euro, grin, grin[:3], euro[1:], euro[:1] * 9, [EOS_ID]]
    for _ in range(20):
        tokens = [token for _ in range(30) for token in draw.choice(parts)]
        texts, _ = grow(tokens)
        known = ""
        for count, piece in enumerate(texts[:-1], start=1):
            text = TOKENIZER.decode(tokens[:count], skip_special_tokens=True)
            whole = known if text.endswith("\N{REPLACEMENT CHARACTER}") else text
            assert (known + piece, count) == (whole, count)
            known = whole
        assert known + texts[-1] == TOKENIZER.decode(tokens, skip_special_tokens=True)


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    num_decoded = 0

    def decode(self, tokens: list[int], **options: Any) -> str:
        self.num_decoded += len(tokens)
        return str(TOKENIZER.decode(tokens, **options))


@pytest.mark.parametrize("text", [byte_ids("a€😀 b"), [EOS_ID], byte_ids("€")[:1]], ids=str)
def test_each_token_costs_the_same(text: list[int]) -> None:
    tokenizer = Counting()
    stream = TextStream(tokenizer, ())
    tokens = text * 200
    for token in tokens:
        stream.add(token)
    stream.end()
    assert tokenizer.num_decoded < 12 * len(tokens)


@pytest.mark.parametrize(
    ("text", "stops", "expected", "stop"),
    [
        ("one END two", ("END",), "one ", "END"),
        ("one EN two", ("END",), "one EN two", None),
        ("ab\n\nc", ("\n\n", "c"), "ab", "\n\n"),
        ("aab", ("ab",), "a", "ab"),
        ("a EN", ("END",), "a EN", None),
        ("x€y", ("€",), "x", "€"),
    ],
)
def test_stop_texts_cut(text: str, stops: tuple[str, ...], expected: str, stop: str | None) -> None:
    texts, found = grow(byte_ids(text), stops)
    assert ("".join(texts), found) == (expected, stop)


def test_what_may_begin_a_stop_text_is_held_back() -> None:
    texts, _ = grow(byte_ids("abENx"), ("END",))
    assert texts == ["a", "b", "", "", "ENx", ""]


def test_a_checkpoint_that_goes_while_it_is_read_is_a_refusal_and_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(folder: Path, **_: Any) -> None:
        (folder / "adapter.safetensors").open()

    monkeypatch.setattr(adapters, "read_checkpoint", read)
    shelf = adapters.AdapterShelf(None, None, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must still be there"):
        shelf.fetch(AdapterKey(str(tmp_path), True, ()), ())
