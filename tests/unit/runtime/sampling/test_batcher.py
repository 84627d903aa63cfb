"""Requests wait for memory and adapters, share steps, and are taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer
from tlora_megatron.integrations.megatron.key_cache import CacheShape, Growth, KeyCache
from tlora_megatron.runtime.sampling.batcher import Batcher, Words
from tlora_megatron.runtime.sampling.tracks import Request
from tlora_megatron.runtime.sampling.values import AdapterKey, Piece, Prompt, SamplingParams


class Counting:
    """A model whose next token is the last one plus 1, and 0 behind the vocabulary."""

    def __init__(self, num_rows: int = 64, step_tokens: int = 16) -> None:
        shape = CacheShape(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
        self.cache = KeyCache(shape, num_rows, torch.device("cpu"))
        self.step_tokens = step_tokens
        self.steps: list[list[Growth]] = []

    def step(self, growths: Sequence[Growth], num_slots: int) -> torch.Tensor:
        assert [growth.slot for growth in growths] == sorted(growth.slot for growth in growths)
        assert sum(len(growth.tokens) for growth in growths) <= self.step_tokens
        self.steps.append(list(growths))
        tokens = [token for growth in growths for token in growth.tokens]
        return torch.tensor(tokens, dtype=torch.float32)[:, None]

    def logits(self, hidden_nH: torch.Tensor) -> torch.Tensor:
        next_n = (hidden_nH[:, 0].long() + 1) % VOCAB_SIZE
        return 10 * torch.nn.functional.one_hot(next_n, VOCAB_SIZE).float()


class Shelf:
    """Room for one adapter; folders that begin with `bad` hold none."""

    def __init__(self) -> None:
        self.held: AdapterKey | None = None

    num_slots = 1

    def fetch(self, key: AdapterKey, in_use: Any) -> bool:
        if key.folder.startswith("bad"):
            raise ValueError(f"adapter {key.folder} holds nothing")
        if self.held not in (None, key) and self.held in in_use:
            return False
        self.held = key
        return True

    def slot(self, key: AdapterKey | None) -> int:
        return 1 if key is None else 0


@pytest.fixture(autouse=True)
def _folders_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterKey, "of", classmethod(lambda cls, folder: cls(folder, False, ())))


def make(model: Counting, **options: int) -> Batcher:
    words = Words(
        tokenizer=tiny_tokenizer(), eos=frozenset({120}), vocab_size=VOCAB_SIZE, max_positions=50
    )
    shelf: Any = Shelf()
    return Batcher(model, shelf, words, most_sequences=options.get("most_sequences", 8))


class Asked:
    """Requests of a test with what they are told."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.told: list[Piece | ValueError] = []
        self.requests: list[Request] = []

    def ask(self, *tokens: int, adapter: str | None = None, n: int = 1, **params: Any) -> None:
        prompt = Prompt(
            tokens=tokens,
            adapter=adapter,
            num_samples=n,
            params=SamplingParams(temperature=0.0, **params),
        )
        number = len(self.requests)
        request = self.batcher.request(prompt, number, seed=1, tell=self.told.append)
        self.requests.append(request)
        self.batcher.add(request)

    def finish(self) -> None:
        while self.batcher.has_work:
            self.batcher.step()

    def tokens(self, prompt: int, sample: int = 0) -> list[int]:
        pieces = [piece for piece in self.told if isinstance(piece, Piece)]
        mine = [piece for piece in pieces if (piece.prompt, piece.sample) == (prompt, sample)]
        return [token for piece in mine for token in piece.tokens]


def test_prompts_longer_than_a_step_are_read_in_parts_beside_samples() -> None:
    model = Counting(step_tokens=4)
    asked = Asked(make(model, most_sequences=4))
    asked.ask(10, max_tokens=6)
    asked.batcher.step()
    asked.ask(*range(20, 30), max_tokens=2)
    asked.finish()
    assert asked.tokens(0) == [11, 12, 13, 14, 15, 16]
    assert asked.tokens(1) == [30, 31]
    assert [[len(growth.tokens) for growth in step] for step in model.steps[:4]] == [
        [1], [1, 3], [1, 3], [1, 3],
    ]  # fmt: skip
    assert model.cache.num_free == model.cache.num_rows


def test_requests_wait_for_rows_in_their_order() -> None:
    model = Counting(num_rows=10)
    asked = Asked(make(model))
    asked.ask(10, 11, 12, max_tokens=6)  # 8 rows
    asked.ask(20, max_tokens=4)  # 4 rows
    asked.ask(30, max_tokens=1)  # 1 row, but behind the second
    asked.batcher.step()
    assert len(model.steps[0]) == 1
    asked.finish()
    assert (asked.tokens(0)[-1], asked.tokens(1)[-1], asked.tokens(2)) == (18, 24, [31])


def test_samples_share_the_prompt_s_rows() -> None:
    model = Counting()
    asked = Asked(make(model))
    asked.ask(10, 11, 12, n=3, max_tokens=3)
    asked.batcher.step()
    assert model.cache.num_rows - model.cache.num_free == 3 + 3 * 2
    asked.finish()
    assert all(asked.tokens(0, sample) == [13, 14, 15] for sample in range(3))
    rows = [growth.rows for growth in model.steps[-1]]
    assert len({row for own in rows for row in own[3:]}) == 6
    assert len({tuple(own[:3]) for own in rows}) == 1


def test_end_tokens_stop_texts_and_lengths() -> None:
    asked = Asked(make(Counting()))
    asked.ask(117, max_tokens=9)
    asked.ask(117, max_tokens=9, ignore_eos=True)
    asked.ask(117, max_tokens=9, stop_tokens=(119,))
    asked.ask(8 + ord("a"), stop=("cd",))
    asked.finish()
    ends = {p.prompt: p for p in asked.told if isinstance(p, Piece) and p.stop_reason}
    assert asked.tokens(0) == [118, 119, 120]
    assert (ends[0].stop_reason, ends[0].stopped_by) == ("stop", 120)
    assert (len(asked.tokens(1)), ends[1].stop_reason) == (9, "length")
    assert (asked.tokens(2), ends[2].stopped_by) == ([118, 119], 119)
    assert (ends[3].stop_reason, ends[3].stopped_by) == ("stop", "cd")
    text = "".join(p.text for p in asked.told if isinstance(p, Piece) and p.prompt == 3)
    assert text == "b"


class Constant(Counting):
    """A model that likes two tokens, whatever comes before."""

    def logits(self, hidden_nH: torch.Tensor) -> torch.Tensor:
        logits_nV = torch.zeros(len(hidden_nH), VOCAB_SIZE)
        logits_nV[:, 5], logits_nV[:, 6] = 1.0, 0.8
        return logits_nV


def test_penalties_are_of_generated_tokens_and_log_probabilities_the_model_s() -> None:
    asked = Asked(make(Constant()))
    for fields in ({}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}):
        asked.ask(5, max_tokens=4, **fields)
    asked.finish()
    assert [asked.tokens(n) for n in range(3)] == [[5, 5, 5, 5], [5, 6, 5, 5], [5, 6, 5, 6]]
    pieces = [piece for piece in asked.told if isinstance(piece, Piece)]
    assert len({(*piece.tokens, *piece.logprobs) for piece in pieces}) == 2


@pytest.mark.parametrize(("rows", "most_new"), [(4000, 30), (200, 6), (64, 1)])
def test_no_length_means_what_the_base_and_a_part_of_the_memory_have(
    rows: int, most_new: int
) -> None:
    batcher = make(Counting(num_rows=rows))
    prompt = Prompt(tokens=(9,) * 20)
    assert batcher.request(prompt, 0, 0, lambda _: None).most_new == most_new


def test_what_cannot_be_is_refused() -> None:
    asked = Asked(make(Counting(num_rows=30)))
    with pytest.raises(ValueError, match="shorter than the base's 50 positions, got 50"):
        asked.ask(*[9] * 50)
    with pytest.raises(ValueError, match="tokens must be between 0 and 263, got 264"):
        asked.ask(1, 264)
    with pytest.raises(ValueError, match="at most 30 tokens together, got 38; ask for fewer"):
        asked.ask(*[9] * 20, n=2, max_tokens=10)
    with pytest.raises(ValueError, match="top_p must be above 0 and at most 1, got 0"):
        asked.ask(1, top_p=0)


def test_adapters_wait_for_a_free_place_and_bad_ones_are_told() -> None:
    model = Counting()
    asked = Asked(make(model))
    asked.ask(10, adapter="one", max_tokens=3)
    asked.ask(20, adapter="two", max_tokens=2)
    asked.ask(30, adapter="bad", max_tokens=2)
    asked.ask(40, max_tokens=2)
    asked.finish()
    assert (asked.tokens(0)[-1], asked.tokens(1), asked.tokens(3)) == (13, [21, 22], [41, 42])
    (error,) = [one for one in asked.told if isinstance(one, ValueError)]
    assert "bad holds nothing" in str(error)


def test_cancelled_requests_give_their_rows_back() -> None:
    model = Counting(num_rows=20)
    asked = Asked(make(model))
    asked.ask(10, max_tokens=9, n=2)
    asked.ask(20, max_tokens=9)
    asked.batcher.step()
    for request in asked.requests:
        request.is_cancelled = True
    asked.finish()
    assert len(model.steps) == 1
    assert model.cache.num_free == model.cache.num_rows


class Broken(Counting):
    """Its next token behind 13 is none."""

    def logits(self, hidden_nH: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden_nH).masked_fill(hidden_nH == 13, float("nan"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_logits_that_are_not_finite_end_their_request_alone(
    temperature: float, max_tokens: int
) -> None:
    model = Broken()
    asked = Asked(make(model))
    asked.ask(20, max_tokens=3)
    asked.ask(12, 13, 14, max_tokens=0) if max_tokens == 0 else asked.ask(10, max_tokens=6, n=2)
    for request in asked.requests[1:]:
        params = replace(request.prompt.params, temperature=temperature)
        request.prompt = replace(request.prompt, params=params)
    asked.finish()
    assert asked.tokens(0) == [21, 22, 23]
    (error,) = [one for one in asked.told if isinstance(one, ValueError)]
    assert "finite logits" in str(error)
    assert model.cache.num_free == model.cache.num_rows
