"""The text of a sequence that grows is that of the whole, cut before a stop text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.helpers.tiny_tokenizer import EOS_ID, byte_ids, tiny_tokenizer
from tlora_megatron.runtime.sampling.values import TextStream

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
