"""Puts the pieces of a call together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tlora_megatron.runtime.sampling.values import Answer, Piece, Prompt, Sampled, Scores


def gather(prompts: Sequence[Prompt], pieces: Iterable[Piece]) -> list[Answer]:
    """Returns one answer a prompt, in their order; all pieces of a call must be there."""
    scores: dict[int, Scores] = {}
    parts: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        if piece.scores is not None:
            scores[piece.prompt] = piece.scores
        else:
            parts.setdefault((piece.prompt, piece.sample), []).append(piece)
    return [
        _answer(number, prompt, scores.get(number), parts) for number, prompt in enumerate(prompts)
    ]


def _answer(
    number: int,
    prompt: Prompt,
    scores: Scores | None,
    parts: dict[tuple[int, int], list[Piece]],
) -> Answer:
    wanted = prompt.num_samples if prompt.params.max_tokens != 0 else 0
    top = scores.top if scores is not None and prompt.top_prompt_logprobs else None
    return Answer(
        sequences=tuple(_sampled(parts[number, sample]) for sample in range(wanted)),
        prompt_logprobs=scores.logprobs if scores is not None and prompt.prompt_logprobs else None,
        top_prompt_logprobs=top,
    )


def _sampled(pieces: Sequence[Piece]) -> Sampled:
    last = pieces[-1]
    assert last.stop_reason is not None, "a sequence has an end"
    return Sampled(
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        logprobs=tuple(value for piece in pieces for value in piece.logprobs),
        stop_reason=last.stop_reason,
        text="".join(piece.text for piece in pieces),
        stopped_by=last.stopped_by,
        top_logprobs=tuple(top for piece in pieces for top in piece.top_logprobs),
    )
