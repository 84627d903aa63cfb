"""Continuous batching: at every step, all sequences that grow and the prompts there is room for.

Where the device can take its own choices as the next step's tokens, that step begins before the
host knows them: a sequence that turns out to have ended has run one step too far, unseen.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.integrations.megatron.key_cache import Growth
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.runtime.sampling.adapters import AdapterShelf
from tlora_megatron.runtime.sampling.tracks import (
    Chosen,
    Request,
    Tell,
    Track,
    choose,
    draws_of,
    log_probabilities,
    penalise,
    tell_token,
    top_of,
)
from tlora_megatron.runtime.sampling.values import (
    AdapterKey,
    Piece,
    Prompt,
    Scores,
    TextStream,
    TopLogprobs,
)

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
        self._chosen: Chosen | None = None
        """Next tokens that the host has not read; only of sequences that may run ahead."""

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
        if self._chosen is not None:
            chosen, self._chosen = self._chosen, None
            if self._may_run_ahead(chosen):
                self._step_ahead(chosen)
                return
            self._read(chosen)
        plan = self._plan()
        growths = [self._growth(track, count) for track, count in plan]
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

    def _growth(self, track: Track, count: int) -> Growth:
        tokens = tuple(track.tokens[track.cached : track.cached + count])
        slot = self._shelf.slot(track.request.key)
        return Growth(slot=slot, past=track.cached, tokens=tokens, rows=track.rows)

    def _may_run_ahead(self, chosen: Chosen) -> bool:
        """True if the next step is of these sequences alone."""
        live = sum(not track.has_ended for track in chosen.tracks)
        return self._model.takes_choices and live == len(self._tracks)

    def _step_ahead(self, chosen: Chosen) -> None:
        """Computes the step behind tokens that only the device knows, then reads these."""
        rows = [
            row
            for row, track in enumerate(chosen.tracks)
            if not track.has_ended and track.num_new + 1 < track.request.most_new
        ]
        if rows:
            tracks, tokens_n = [chosen.tracks[row] for row in rows], chosen.tokens_n
            if len(rows) < len(tokens_n):
                tokens_n = tokens_n[to_device(torch.tensor(rows), tokens_n.device)]
            growths = [replace(self._growth(track, 1), tokens=(0,)) for track in tracks]
            hidden_TH = self._model.step(growths, self._shelf.num_slots, tokens_n)
            for track in tracks:
                track.cached += 1
            self._chosen = self._choose(tracks, self._model.logits(hidden_TH))
        self._tell_late()
        self._read(chosen)
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
            logits_nV = self._model.logits(hidden_TH[to_device(index, hidden_TH.device)])
            chosen = self._choose(tracks, logits_nV)
            is_one = len(growing) == len(tracks)
            if is_one and self._model.takes_choices and all(track.may_wait for track in tracks):
                self._chosen = chosen
            else:
                self._read(chosen)

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

    def _choose(self, tracks: Sequence[Track], logits_nV: Tensor) -> Chosen:
        """Chooses the next token of each sequence, without a wait for the device."""
        params = [track.request.prompt.params for track in tracks]
        draws = [track.draws for track in tracks if track.draws is not None]
        chosen_n = choose(penalise(logits_nV, tracks), params, draws)
        logprobs_nV = log_probabilities(logits_nV)
        logprobs_n = logprobs_nV.gather(1, chosen_n[:, None])[:, 0]
        ends = logits_nV.aminmax(dim=-1)
        columns = (chosen_n, logprobs_n, ends.min.isfinite() & ends.max.isfinite())
        found = torch.stack([column.double() for column in columns], dim=1)
        top = {
            row: top_of(logprobs_nV[row], one.top_logprobs)
            for row, one in enumerate(params)
            if one.top_logprobs
        }
        return Chosen(tracks, chosen_n, found, top)

    def _read(self, chosen: Chosen) -> None:
        """Gives each sequence its next token; the only place where a step waits for the device."""
        found = chosen.wait()
        rows = [row for row, track in enumerate(chosen.tracks) if not track.has_ended]
        _refuse([chosen.tracks[row] for row in rows if not found[row][2]])
        for row in rows:
            token, logprob, is_good = found[row]
            if is_good:
                self._append(chosen.tracks[row], int(token), logprob, chosen.top.get(row))

    def _append(self, track: Track, token: int, logprob: float, top: TopLogprobs | None) -> None:
        """Adds a token, and tells it: late where that cannot change what is computed next."""
        params = track.request.prompt.params
        track.tokens.append(token)
        is_eos = token in self.words.eos and not params.ignore_eos
        by = token if is_eos or token in params.stop_tokens else None
        has_ended = by is not None or track.num_new == track.request.most_new
        tell = functools.partial(tell_token, track, token, logprob, top, by, has_ended)
        if params.stop or not self._model.runs_ahead:
            has_ended = tell()
        else:
            self._late.append(tell)
        if has_ended:
            self._remove(track)

    def _tell_late(self) -> None:
        for tell in self._late:
            tell()
        self._late.clear()

    def _remove(self, track: Track) -> None:
        """Lets go of a sequence; the rows of a request go back with its last one."""
        self._tracks.remove(track)
        track.has_ended = True
        request = track.request
        request.num_live -= 1
        if request.num_live == 0:
            self._model.cache.release(request.rows)
            request.rows = request.rows[:0]


def _refuse(tracks: Sequence[Track]) -> None:
    """Ends the requests of sequences that have no next token; others go on."""
    for request in {id(track.request): track.request for track in tracks}.values():
        request.is_cancelled = True
        request.tell(ValueError("the model must give finite logits, got some that are not"))
