"""Bodies of the `tinker` client's requests.

Fields that a newer SDK adds are passed over, but for settings of adapters and of sampling: there
one that asks for something is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

from fastapi import Body
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from tlora_megatron.runtime.sampling import values
from tlora_megatron.service.api.tinker.names import Refused

Word = Annotated[str, Body(embed=True, max_length=256)]
"""The one field of a body, by its name."""
_Text = Annotated[str, Field(max_length=256)]
_Count = Annotated[int, Field(ge=0, lt=10**9)]
_SeqId = Annotated[int, Field(ge=1, lt=10**9)]
RECORDED_TOKENS = 4
"""Likeliest tokens of a place that `record_stability_info` keeps; a sequence then trains as often,
once for each."""
_Metadata = Annotated[Mapping[_Text, Any], Field(max_length=64)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class _Settings(_Body):
    model_config = ConfigDict(extra="allow")

    def check_rest(self, name: str) -> None:
        """Refuses settings that this service does not have, named by `name`."""
        for key, value in (self.model_extra or {}).items():
            if value:
                raise Refused(
                    f"{name}.{key:.80} must be left out: this service has it not, got {value!r:.80}"
                )


class CreateSession(_Body):
    """Body of `create_session`."""

    sdk_version: _Text
    tags: list[_Text] = Field(default=[], max_length=64)
    user_metadata: _Metadata | None = None
    display_name: _Text | None = None


class LoraConfig(_Settings):
    """The adapter of a new model."""

    rank: Annotated[int, Field(ge=1, le=4096)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(_Body):
    """The optimizer of a new model."""

    type: _Text = "adamw"


class CreateModel(_Body):
    """Body of `create_model`."""

    session_id: _Text
    model_seq_id: _Count
    base_model: _Text
    user_metadata: _Metadata | None = None
    lora_config: LoraConfig = LoraConfig(rank=32)
    optimizer_config: OptimizerConfig = OptimizerConfig()


class OptimStep(_Body):
    """Body of `optim_step`."""

    model_id: _Text
    seq_id: _SeqId
    adam_params: Mapping[_Text, float] | None = None
    optimizer_params: Mapping[_Text, Any] | None = Field(
        default=None, validation_alias=AliasChoices("optimizer_params", "optim_params")
    )


class SaveWeights(_Body):
    """Body of `save_weights`, `save_weights_for_sampler` and `save_weights_external`."""

    model_id: _Text
    seq_id: _SeqId
    path: _Text | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Annotated[Mapping[_Text, _Text], Field(max_length=64)] | None = None
    sampling_session_seq_id: _Count | None = None
    kind: _Text = "snapshot"
    age_encryption_recipients: list[str] | None = None


class LoadWeights(_Body):
    """Body of `load_weights`: into a model, or into one that is made by it."""

    path: _Text
    optimizer: bool
    model_id: _Text | None = None
    seq_id: _SeqId | None = None
    session_id: _Text | None = None
    model_seq_id: _Count | None = None
    base_model: _Text | None = None
    user_metadata: _Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class Ttl(_Body):
    """Body of a checkpoint's `ttl`."""

    ttl_seconds: int | None = None


class CreateSampler(_Body):
    """Body of `create_sampling_session`."""

    session_id: _Text
    sampling_session_seq_id: _Count
    base_model: _Text | None = None
    model_path: _Text | None = None


class Chunk(_Body):
    """A piece of a prompt."""

    type: _Text = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] = []


class ModelInput(_Body):
    """A prompt."""

    chunks: Annotated[list[Chunk], Field(max_length=10_000)]


class SamplingParams(_Settings):
    """How tokens are drawn."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: int = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TargetIds(_Body):
    """Tokens to score in the place of each of a prompt's but the first: a table, dense or CSR."""

    data: list[Annotated[int, Field(ge=-1, lt=2**31)]]
    shape: Annotated[list[_Count], Field(min_length=2, max_length=2)]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each row, without the cells that ask for nothing."""
        ends, (count, width) = self.sparse_crow_indices, self.shape
        if ends is None and len(self.data) == count * width:
            ends = list(range(0, len(self.data) + 1, max(1, width)))
        ends = ends or [0]
        falls = any(end < begin for begin, end in pairwise(ends))
        if len(ends) != count + 1 or falls or (ends[0], ends[-1]) != (0, len(self.data)):
            rule = f"be a whole table of {count} rows"
            raise Refused(f"target_prompt_logprobs must {rule}, got {len(self.data)} values")
        rows = (self.data[begin:end] for begin, end in pairwise(ends))
        return tuple(tuple(token for token in row if token >= 0) for row in rows)


class Sample(_Body):
    """Body of `asample`."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    base_model: _Text | None = None
    model_path: _Text | None = None
    sampling_session_id: _Text | None = None
    seq_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: TargetIds | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: bool | None = None


def check_sample(body: Sample) -> None:
    """Refuses what this service does not sample; raises `Refused` naming the field."""
    body.sampling_params.check_rest("sampling_params")
    if body.prompt_alt_tokens_k > 0:
        raise Refused("prompt_alt_tokens_k must be left out: this service does not do that")
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise Refused(f"prompt must be tokens of text, got a chunk of {chunk.type!r:.80}")
    if not any(chunk.tokens for chunk in body.prompt.chunks):
        raise Refused("prompt must hold at least one token, got none")
    try:
        as_prompt(body, None, 0)
    except ValueError as error:
        raise Refused(str(error)) from error


def as_prompt(body: Sample, adapter: str | None, seed: int) -> values.Prompt:
    """Makes a sampler's prompt;

    `adapter` None = the base alone, `seed` where the client gave none.
    """
    tokens = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
    top_logprobs, targets = body.topk_sample_logprobs, body.target_prompt_logprobs
    if body.record_stability_info:
        top_logprobs = max(top_logprobs, RECORDED_TOKENS)
    return values.Prompt(
        tokens=tokens,
        adapter=adapter,
        params=_params(body.sampling_params, top_logprobs, seed),
        num_samples=body.num_samples,
        prompt_logprobs=bool(body.prompt_logprobs),
        top_prompt_logprobs=body.topk_prompt_logprobs,
        targets=() if targets is None else targets.rows(),
    )


def _params(asked: SamplingParams, top_logprobs: int, seed: int) -> values.SamplingParams:
    stop = [asked.stop] if isinstance(asked.stop, str) else list(asked.stop or ())
    return values.SamplingParams(
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
