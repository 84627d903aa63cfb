"""Sampling is exact; requests wait for memory and adapters, share steps, and are taken back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.helpers.sampling_case import Reference, greedy, opened, sample, write_adapters
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer, tiny_tokenizer
from tlora_megatron.integrations.megatron.decoder import Decoder, bucket_of, pack_step
from tlora_megatron.integrations.megatron.key_cache import CacheShape, Growth, KeyCache
from tlora_megatron.ops.decoding import most_runs, slot_runs
from tlora_megatron.runtime.sampling.batcher import Batcher, Words
from tlora_megatron.runtime.sampling.tracks import Request
from tlora_megatron.runtime.sampling.values import AdapterKey, Piece, Prompt, SamplingParams


class Counting:
    """A model whose next token is the last one plus 1, and 0 behind the vocabulary."""

    def __init__(self, num_rows: int = 64, step_tokens: int = 16) -> None:
        shape = CacheShape(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
        self.cache = KeyCache(shape, num_rows, torch.device("cpu"))
        self.step_tokens = step_tokens
        self.runs_ahead = False
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


def test_a_step_s_numbers_lie_where_a_recorded_graph_looks() -> None:
    assert [bucket_of(rows) for rows in (1, 2, 3, 5, 64, 65)] == [1, 2, 4, 8, 64, 128]
    pages = [np.array([7, 3, 9]), np.array([1, 2]), np.array([5, 6, 8, 4])]
    growths = [
        Growth(slot=slot, past=past, tokens=(90 + slot,), rows=rows)
        for slot, past, rows in zip((0, 1, 1), (2, 0, 3), pages, strict=True)
    ]
    numbers = pack_step(growths, 2, scratch=63).tolist()
    tokens, places, new_rows, begins, lens = (numbers[4 * i : 4 * i + 4] for i in range(5))
    assert (tokens, places) == ([90, 91, 91, 0], [2, 0, 3, 0])
    assert (new_rows, lens) == ([9, 1, 4, 63], [3, 1, 4, 1])
    runs, rows = np.reshape(numbers[20:26], (2, 3)).tolist(), numbers[26:]
    assert runs == [[0, 0, 1], [1, 1, 3]]
    seen = [rows[begin : begin + count] for begin, count in zip(begins, lens, strict=True)]
    assert seen == [[7, 3, 9], [1], [5, 6, 8, 4], [63]]
    many = slot_runs([0] * 17 + [1] * 16 + [3] * 9, 3, most_runs(42, 3))
    assert many.tolist() == [[0, 0, 16], [0, 16, 17], [1, 17, 33], [0, 0, 0], [0, 0, 0]]


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


def test_steps_of_single_tokens_are_those_of_the_model(case: Opened) -> None:
    batcher, (model, bank) = case.batcher, (case.batcher._model, case.batcher._shelf._bank)
    if model.spec.experts is not None:
        assert model.decoder is None
        return
    prompts = [greedy(prompt, 12) for prompt in prompts_of(case)]
    expected = sample(batcher, prompts)
    model.decoder = Decoder(model._hidden, model.cache, bank, records=False)
    sizes: list[int] = []
    compute = model.decoder._compute
    model.decoder._compute = lambda view, ids: (sizes.append(len(ids)), compute(view, ids))[1]
    try:
        found = sample(batcher, [*prompts, replace(prompts[4], num_samples=3)])
    finally:
        model.decoder = None
    assert {2, 4, 8} <= set(sizes), "rows were left over, and ended one by one"
    for one, other in zip(found, [*expected, expected[4]], strict=True):
        for sequence in one.sequences:
            assert sequence.tokens == other.sequences[0].tokens
            assert sequence.logprobs == pytest.approx(other.sequences[0].logprobs, abs=TOLERANCE)


def test_news_are_late_where_the_device_is() -> None:
    class Ahead(Counting):
        """Tells how much was told when each step began."""

        def step(self, growths: Sequence[Growth], num_slots: int) -> torch.Tensor:
            told.append(len(asked.told))
            return super().step(growths, num_slots)

    model, told = Ahead(), list[int]()
    model.runs_ahead = True
    asked = Asked(make(model))
    asked.ask(10, max_tokens=4)
    asked.ask(8 + ord("a"), stop=("d",))
    asked.finish()
    assert asked.tokens(0) == [11, 12, 13, 14]
    # Of the first, one token behind; of the second, whose text may end it, at once.
    assert told == [0, 1, 3, 5]


def test_hidden_states_do_not_come_from_a_former_holder_of_the_rows(case: Opened) -> None:
    prompt = greedy(prompts_of(case)[0], 8)
    cache = case.batcher._model.cache
    (before,) = sample(case.batcher, [prompt])
    rows = np.arange(cache.num_rows)
    case.batcher._model.step(
        [Growth(slot=case.batcher._shelf.num_slots, past=0, tokens=(9,) * 40, rows=rows)],
        case.batcher._shelf.num_slots,
    )
    assert sample(case.batcher, [prompt]) == [before]
