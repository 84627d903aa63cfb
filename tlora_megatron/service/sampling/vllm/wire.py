"""Prompts as requests to vLLM's `/v1/completions`, and pieces from its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tlora_megatron.runtime.sampling.values import (
    Piece,
    Prompt,
    Scores,
    TokenLogprob,
    TopLogprobs,
)

_TOKEN = "token_id:"


def to_request(model: str, prompt: Prompt) -> dict[str, Any]:
    """The body; it streams unless the prompt is to be scored, which vLLM does not in a stream."""
    params, scored = prompt.params, wants_scores(prompt)
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt.tokens),
        # A prompt is not scored without a token behind it.
        "max_tokens": 1 if params.max_tokens == 0 else params.max_tokens,
        "n": prompt.num_samples,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or 0,
        "seed": params.seed,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_tokens),
        "ignore_eos": params.ignore_eos,
        "logprobs": params.top_logprobs,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "stream": not scored,
    }
    if scored:
        body["prompt_logprobs"] = prompt.top_prompt_logprobs
    return body


def wants_scores(prompt: Prompt) -> bool:
    """True if a prompt's own tokens are to be scored."""
    wanted = prompt.prompt_logprobs or prompt.top_prompt_logprobs > 0
    return wanted or prompt.params.max_tokens == 0


def pieces_of(number: int, prompt: Prompt, body: Mapping[str, Any]) -> Iterator[Piece]:
    """The pieces of an answer, or of an event of a stream.

    Args:
        number: of the prompt in its call.
    """
    choices = body.get("choices", ())
    if wants_scores(prompt) and choices:
        yield Piece(prompt=number, scores=_scores(prompt, choices[0]["prompt_logprobs"]))
    if prompt.params.max_tokens == 0:
        return
    for choice in choices:
        yield _piece(number, prompt, choice)


def _piece(number: int, prompt: Prompt, choice: Mapping[str, Any]) -> Piece:
    tokens = tuple(choice.get("token_ids") or ())
    logprobs = choice.get("logprobs") or {}
    count, reason = prompt.params.top_logprobs, choice.get("finish_reason")
    stopped_by = choice.get("stop_reason")
    if reason == "stop" and stopped_by is None:  # vLLM does not name the end of sequence
        stopped_by = tokens[-1] if tokens else None
    return Piece(
        prompt=number,
        sample=choice["index"],
        tokens=tokens,
        logprobs=tuple(logprobs.get("token_logprobs") or ()),
        top_logprobs=tuple(
            _likeliest({int(t.removeprefix(_TOKEN)): v for t, v in top.items()}, count)
            for top in (logprobs.get("top_logprobs") or ())
            if count
        ),
        text=choice["text"],
        stop_reason=None if reason is None else "stop" if reason == "stop" else "length",
        stopped_by=stopped_by if reason == "stop" else None,
    )


def _scores(prompt: Prompt, rows: Sequence[Mapping[str, Any] | None]) -> Scores:
    """Scores from the likeliest tokens of each place and the token that is there."""
    logprobs: list[float | None] = [None]
    top: list[TopLogprobs | None] = [None]
    for token, row in zip(prompt.tokens[1:], rows[1:], strict=True):
        assert row is not None, "only the first token has none before it"
        found = {int(key): float(value["logprob"]) for key, value in row.items()}
        logprobs.append(found[token])
        top.append(_likeliest(found, prompt.top_prompt_logprobs))
    return Scores(logprobs=tuple(logprobs), top=tuple(top) if prompt.top_prompt_logprobs else ())


def _likeliest(found: Mapping[int, float], count: int) -> TopLogprobs:
    order = sorted(found.items(), key=lambda pair: -pair[1])
    return tuple(TokenLogprob(token, logprob) for token, logprob in order[:count])
