"""Reads `asample` into what a sampler takes."""

from __future__ import annotations

from tlora_megatron.runtime.sampling.values import Prompt, SamplingParams
from tlora_megatron.service.api.tinker.refusals import Refused
from tlora_megatron.service.api.tinker.wire.bodies import Sample
from tlora_megatron.service.api.tinker.wire.bodies import SamplingParams as Asked


def check_sample(body: Sample) -> None:
    """Refuses what this service does not sample.

    Raises:
        Refused: naming the field.
    """
    body.sampling_params.check_rest("sampling_params")
    unknown = {
        "target_prompt_logprobs": body.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": body.prompt_alt_tokens_k > 0,
        "record_stability_info": bool(body.record_stability_info),
    }
    for name, is_asked in unknown.items():
        if is_asked:
            raise Refused(f"{name} must be left out: this service does not do that")
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise Refused(f"prompt must be tokens of text, got a chunk of {chunk.type!r:.80}")
    if not any(chunk.tokens for chunk in body.prompt.chunks):
        raise Refused("prompt must hold at least one token, got none")
    try:
        as_prompt(body, None, 0)
    except ValueError as error:
        raise Refused(str(error)) from error


def as_prompt(body: Sample, adapter: str | None, seed: int) -> Prompt:
    """Makes the prompt that a sampler takes.

    Args:
        adapter: folder of the weights; None = the base alone.
        seed: where the client gave none.
    """
    tokens = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
    return Prompt(
        tokens=tokens,
        adapter=adapter,
        params=_params(body.sampling_params, body.topk_sample_logprobs, seed),
        num_samples=body.num_samples,
        prompt_logprobs=bool(body.prompt_logprobs),
        top_prompt_logprobs=body.topk_prompt_logprobs,
    )


def _params(asked: Asked, top_logprobs: int, seed: int) -> SamplingParams:
    stop = [asked.stop] if isinstance(asked.stop, str) else list(asked.stop or ())
    return SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_k=None if asked.top_k <= 0 else asked.top_k,
        top_p=asked.top_p,
        seed=seed if asked.seed is None else asked.seed,
        stop=tuple(entry for entry in stop if isinstance(entry, str)),
        stop_tokens=tuple(entry for entry in stop if isinstance(entry, int)),
        ignore_eos=asked.stop == [],
        top_logprobs=top_logprobs,
    )
