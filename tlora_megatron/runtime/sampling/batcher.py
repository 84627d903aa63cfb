"""Continuous batching: at every step, all sequences that grow and the prompts there is room for."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.config.load import read_gang_config
from tlora_megatron.integrations.megatron.key_cache import Growth
from tlora_megatron.layers.adapter_bank import AdapterBank, BankShape
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.decoding_ops import DecodingOps
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.lora.kernel_choice import choose_ops
from tlora_megatron.runtime.backbone import know_base, open_backbone
from tlora_megatron.runtime.sampling.adapters import AdapterShelf
from tlora_megatron.runtime.sampling.tracks import (
    Request,
    Tell,
    Track,
    choose,
    draws_of,
    log_probabilities,
    penalise,
    top_of,
)
from tlora_megatron.runtime.sampling.values import (
    AdapterKey,
    Piece,
    Prompt,
    SamplerLimits,
    Scores,
    StopReason,
    TextStream,
)
from tlora_megatron.training.data.tokenize import load_tokenizer, stop_tokens
from tlora_megatron.training.run.training_run import DTYPES

if TYPE_CHECKING:
    from tlora_megatron.integrations.megatron.stepper import Stepper

_SCORED_ROWS = 256
"""Rows of logits that exist at a time: 131 MB of fp32 at 128,256 tokens."""

_OPEN_END_SHARE = 8
"""A request that names no length reserves at most such a part of the cache's rows: others go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """The meaning of a base's tokens."""

    tokenizer: Any
    eos: frozenset[int]
    vocab_size: int
    max_positions: int


class Batcher:
    """Requests that wait, and sequences that grow."""

    def __init__(
        self, model: Stepper, shelf: AdapterShelf, words: Words, *, most_sequences: int
    ) -> None:
        self._model = model
        self._shelf = shelf
        self.words = words
        self._most_sequences = min(most_sequences, model.step_tokens)
        self._waiting: deque[Request] = deque()
        self._tracks: list[Track] = []
        self._late: list[Callable[[], bool]] = []
        """What is told, and decoded to text, while the device computes the next step."""

    @property
    def has_work(self) -> bool:
        """True if a step would do something."""
        return bool(self._waiting or self._tracks)

    def request(self, prompt: Prompt, number: int, seed: int, tell: Tell) -> Request:
        """Checks a request; `add` takes it.

        Raises:
            ValueError: for what the base or the sampler cannot do.
        """
        self._check_tokens(prompt)
        params, rows = prompt.params, self._model.cache.num_rows
        found = Request(
            prompt=prompt,
            number=number,
            tell=tell,
            most_new=self._most_new(prompt),
            seed=seed if params.seed is None else params.seed,
            key=None if prompt.adapter is None else AdapterKey.of(prompt.adapter),
        )
        if found.num_rows > rows:
            raise ValueError(
                f"prompt and max_tokens of {prompt.num_samples} samples must have at most {rows} "
                f"tokens together, got {found.num_rows}; ask for fewer"
            )
        return found

    def _check_tokens(self, prompt: Prompt) -> None:
        words = self.words
        asked = itertools.chain(prompt.tokens, *prompt.targets)
        wrong = (token for token in asked if not 0 <= token < words.vocab_size)
        worst = next(wrong, None)
        if worst is not None:
            raise ValueError(f"tokens must be between 0 and {words.vocab_size - 1}, got {worst}")
        if len(prompt.tokens) + (prompt.params.max_tokens != 0) > words.max_positions:
            raise ValueError(
                f"prompt must be shorter than the base's {words.max_positions} positions, "
                f"got {len(prompt.tokens)} tokens"
            )

    def _most_new(self, prompt: Prompt) -> int:
        """Tokens of each sample, which never go beyond the base's positions."""
        length, left = len(prompt.tokens), self.words.max_positions - len(prompt.tokens)
        if prompt.params.max_tokens is not None:
            return min(left, prompt.params.max_tokens)
        share = self._model.cache.num_rows // _OPEN_END_SHARE
        return max(1, min(left, (share - length) // prompt.num_samples + 1))

    def add(self, request: Request) -> None:
        """Lets a request wait for room."""
        self._waiting.append(request)

    def step(self) -> None:
        """Takes in what there is room for, computes one step, and tells what came of it."""
        self._waiting = deque(one for one in self._waiting if not one.is_cancelled)
        for track in [track for track in self._tracks if track.request.is_cancelled]:
            self._remove(track)
        self._admit()
        plan = self._plan()
        growths = [
            Growth(
                slot=self._shelf.slot(track.request.key),
                past=track.cached,
                tokens=tuple(track.tokens[track.cached : track.cached + count]),
                rows=track.rows,
            )
            for track, count in plan
        ]
        hidden_TH = self._model.step(growths, self._shelf.num_slots) if plan else None
        self._tell_late()
        if hidden_TH is None:
            return
        ends = torch.tensor([count for _, count in plan]).cumsum(0).tolist()
        ready: list[tuple[Track, int]] = []
        for (track, count), end in zip(plan, ends, strict=True):
            if track.sample is None and track.request.wants_scores:
                self._score(track, hidden_TH[end - count : end])
            track.cached += count
            if track.cached == len(track.tokens):
                ready.append((track, end - 1))
        if ready:
            self._go_on(ready, hidden_TH)
        if not self._tracks:
            self._tell_late()

    def _admit(self) -> None:
        """Starts requests in the order in which they came, while there is room."""
        while self._waiting:
            request = self._waiting[0]
            live = sum(one.request.prompt.num_samples for one in self._tracks if one.sample is None)
            live += sum(one.sample is not None for one in self._tracks)
            fits = live + request.prompt.num_samples <= self._most_sequences
            if (live and not fits) or self._model.cache.num_free < request.num_rows:
                return
            in_use = {one.request.key for one in self._tracks if one.request.key is not None}
            try:
                if request.key and not self._shelf.fetch(request.key, in_use):
                    return
            except ValueError as error:
                request.tell(error)
                self._waiting.popleft()
                continue
            rows = self._model.cache.reserve(request.num_rows)
            assert rows is not None, "there was room"
            request.rows, request.num_live = rows, 1
            tokens = list(self._waiting.popleft().prompt.tokens)
            self._tracks.append(Track(request=request, tokens=tokens, rows=rows[: len(tokens)]))

    def _plan(self) -> list[tuple[Track, int]]:
        """New tokens of each sequence in this step, in the order of slots."""
        left = self._model.step_tokens
        plan = []
        for track in sorted(self._tracks, key=lambda one: one.sample is None):
            count = min(left, len(track.tokens) - track.cached)
            left -= count
            if count:
                plan.append((track, count))
        return sorted(plan, key=lambda pair: self._shelf.slot(pair[0].request.key))

    def _score(self, track: Track, hidden_TH: Tensor) -> None:
        """Scores the tokens of a prompt behind those of a step."""
        request, first = track.request, track.cached + 1
        targets = request.prompt.tokens[first : first + len(hidden_TH)]
        for begin in range(0, len(targets), _SCORED_ROWS):
            labels = targets[begin : begin + _SCORED_ROWS]
            logprobs_nV = log_probabilities(
                self._model.logits(hidden_TH[begin : begin + len(labels)])
            )
            index = torch.tensor(labels, device=logprobs_nV.device)[:, None]
            request.logprobs += logprobs_nV.gather(1, index)[:, 0].tolist()
            if not logprobs_nV.isfinite().all():
                _refuse([track])
                return
            if count := request.prompt.top_prompt_logprobs:
                request.top += [top_of(row, count) for row in logprobs_nV]
            wanted = request.prompt.targets[first - 1 + begin :]
            for row, tokens in zip(logprobs_nV, wanted, strict=False):
                request.targets.append(tuple(row[list(tokens)].tolist()))

    def _go_on(self, ready: Sequence[tuple[Track, int]], hidden_TH: Tensor) -> None:
        """Gives each sequence its next token, and each prompt that is read its samples."""
        growing: list[Track] = []
        rows: list[int] = []
        for track, row in ready:
            samples = self._branch(track) if track.sample is None else [track]
            growing += samples
            rows += [row] * len(samples)
        for begin in range(0, len(growing), _SCORED_ROWS):
            tracks = growing[begin : begin + _SCORED_ROWS]
            index = torch.tensor(rows[begin : begin + _SCORED_ROWS])
            self._choose(tracks, self._model.logits(hidden_TH[to_device(index, hidden_TH.device)]))

    def _branch(self, track: Track) -> list[Track]:
        """Ends a prompt's own track; returns those of its samples."""
        request, rows = track.request, track.rows
        if request.wants_scores:
            top = tuple(request.top) if request.prompt.top_prompt_logprobs else ()
            targets = tuple(request.targets)
            scores = Scores(logprobs=tuple(request.logprobs), top=top, targets=targets)
            request.tell(Piece(prompt=request.number, scores=scores))
        own = request.rows[len(rows) :]
        size, count = request.own_rows, request.prompt.num_samples if request.most_new else 0
        samples = [
            Track(
                request=request,
                tokens=list(track.tokens),
                rows=np.concatenate([rows, own[sample * size : (sample + 1) * size]]),
                cached=track.cached,
                sample=sample,
                draws=draws_of(request.seed, sample),
                text=TextStream(self.words.tokenizer, request.prompt.params.stop),
            )
            for sample in range(count)
        ]
        self._tracks += samples
        request.num_live += count
        self._remove(track)
        return samples

    def _choose(self, tracks: Sequence[Track], logits_nV: Tensor) -> None:
        """Gives each sequence its next token; the only place where a step waits for the device."""
        params = [track.request.prompt.params for track in tracks]
        draws = [track.draws for track in tracks if track.draws is not None]
        chosen_n = choose(penalise(logits_nV, tracks), params, draws)
        logprobs_nV = log_probabilities(logits_nV)
        logprobs_n = logprobs_nV.gather(1, chosen_n[:, None])[:, 0]
        columns = (chosen_n, logprobs_n, logits_nV.isfinite().all(dim=-1))
        found = torch.stack([column.double() for column in columns], dim=1).tolist()
        _refuse([track for track, row in zip(tracks, found, strict=True) if not row[2]])
        for i, (track, (token, logprob, is_good)) in enumerate(zip(tracks, found, strict=True)):
            if is_good:
                count = params[i].top_logprobs
                piece = Piece(
                    prompt=track.request.number,
                    sample=track.sample or 0,
                    tokens=(int(token),),
                    logprobs=(logprob,),
                    top_logprobs=(top_of(logprobs_nV[i], count),) if count else (),
                )
                self._append(track, piece)

    def _append(self, track: Track, piece: Piece) -> None:
        """Adds a token, and tells it: late where that cannot change what is computed next."""
        (token,), params = piece.tokens, track.request.prompt.params
        track.tokens.append(token)
        is_eos = token in self.words.eos and not params.ignore_eos
        by = token if is_eos or token in params.stop_tokens else None
        has_ended = by is not None or track.num_new == track.request.most_new
        if params.stop or not self._model.runs_ahead:
            has_ended = _tell(track, piece, by, has_ended)
        else:
            self._late.append(functools.partial(_tell, track, piece, by, has_ended))
        if has_ended:
            self._remove(track)

    def _tell_late(self) -> None:
        for tell in self._late:
            tell()
        self._late.clear()

    def _remove(self, track: Track) -> None:
        """Lets go of a sequence; the rows of a request go back with its last one."""
        self._tracks.remove(track)
        request = track.request
        request.num_live -= 1
        if request.num_live == 0:
            self._model.cache.release(request.rows)
            request.rows = request.rows[:0]


def _tell(track: Track, piece: Piece, by: int | str | None, has_ended: bool) -> bool:
    """Tells a piece with its text; returns True if its sequence ends, if need be by that text."""
    assert track.text is not None, "a sample has a text"
    text = ""
    if by is None:
        text, by = track.text.add(piece.tokens[0])
    has_ended = has_ended or by is not None
    if has_ended and not isinstance(by, str):
        rest = track.text.end()
        text, by = text + rest.text, by if rest.stop is None else rest.stop
    reason: StopReason | None = None
    if has_ended:
        reason = "length" if by is None else "stop"
    track.request.tell(replace(piece, text=text, stop_reason=reason, stopped_by=by))
    return has_ended


def _refuse(tracks: Sequence[Track]) -> None:
    """Ends the requests of sequences that have no next token; others go on."""
    for request in {id(track.request): track.request for track in tracks}.values():
        request.is_cancelled = True
        request.tell(ValueError("the model must give finite logits, got some that are not"))


_CPU_TOKENS, _GPU_TOKENS = 2048, 8192
_CPU_BYTES, _GPU_SHARE = 512 << 20, 0.5


def open_batcher(base: Mapping[str, Any], limits: SamplerLimits) -> Batcher:
    """Loads a base and makes it ready for requests.

    Args:
        base: the section `base_model` of a configuration, its path absolute. Its dtype is that
            of training, too, so that both say the same log-probabilities.
    """
    on_gpu = torch.cuda.is_available()
    step_tokens = limits.step_tokens or (_GPU_TOKENS if on_gpu else _CPU_TOKENS)
    sections = {
        "base_model": dict(base),
        "run": {"micro_batch_tokens": step_tokens},
    }
    config = read_gang_config(sections, Path("/"), output_dir="/")
    known = know_base(config, (0, 1), refuses_gpt_oss="the base of a sampler")
    spec = known.spec
    opened = open_backbone(config, known)
    held = frozenset(spec.peft_targets)
    dtype, device = DTYPES[config.base_model.dtype], opened.groups.device
    bank = AdapterBank(
        [site for site, _ in opened.linears],
        BankShape(targets=held, block_targets=held),
        dtype=dtype,
        device=device,
        ops=DecodingOps(choose_ops(device, dtype)),
    )
    attach(opened.linears, bank)
    # Not at the top: what needs no model needs no Megatron-core.
    from tlora_megatron.integrations.megatron.stepper import Stepper

    engine: Any = opened.engine
    cache_bytes = limits.cache_bytes
    if cache_bytes is None:
        cache_bytes = int(_GPU_SHARE * torch.cuda.mem_get_info()[0]) if on_gpu else _CPU_BYTES
    stepper = Stepper(engine.model, spec, bank, cache_bytes=cache_bytes, step_tokens=step_tokens)
    shelf = AdapterShelf(bank, spec, limits.adapters)
    words = read_words(config.base_model.folder, spec)
    return Batcher(stepper, shelf, words, most_sequences=limits.sequences)


def read_words(folder: Path, spec: ModelSpec) -> Words:
    """Reads the tokenizer of a base, and which of its tokens end a sequence."""
    tokenizer = load_tokenizer(folder)
    positions = spec.max_positions
    if spec.sliding_window is not None:  # the base runs without a window
        positions = min(positions, spec.sliding_window)
    return Words(
        tokenizer=tokenizer,
        eos=stop_tokens(tokenizer),
        vocab_size=spec.vocab_size,
        max_positions=positions,
    )
