"""Bodies of the two completion endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tlora_megatron.runtime.sampling.values import SamplingParams
from tlora_megatron.service.api.gate import ApiError, refused
from tlora_megatron.training.data.rows import read_asked

_COMPLETION_TOKENS = 16
"""OpenAI's default of `/v1/completions`."""
_PASSED_OVER = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"}
    | {"safety_identifier", "service_tier", "store", "user", "verbosity"}
)
"""Fields that change nothing of what is generated."""
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Fields that are not there, with the values that ask for nothing."""
_INSTEAD: Mapping[str, str] = {
    "functions": "send tools",
    "response_format": "no answer can be held to a format here: ask for it in the messages",
}

Text = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(BaseModel):
    """Settings of how a stream ends."""

    include_usage: bool | None = None


class SamplingBody(BaseModel):
    """The fields that both bodies have."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str = Field(max_length=1000)
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's, but vLLM's, by `extra_body`:
    top_k: int | None = Field(None, ge=-1)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=64)

    @property
    def num_samples(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """True if a stream is to end with the count of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_rest(self) -> None:
        """Refuses fields that are not there; raises `ApiError` naming the first one."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _PASSED_OVER or value in _NOTHING.get(name, ()):
                continue
            raise _not_there(name, "be left out: this service has it not", value)

    def params(self, max_tokens: int | None, top_logprobs: int) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            top_p=1.0 if self.top_p is None else self.top_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seed,
            stop=tuple(stop),
            stop_tokens=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            top_logprobs=top_logprobs,
        )


def _not_there(name: str, rule: str, value: Any) -> ApiError:
    error = refused(name, rule, value, _INSTEAD.get(name, ""))
    error.code = "unsupported_parameter"
    return error


Tokens = Annotated[list[int], Field(min_length=1)]


class CompletionBody(SamplingBody):
    """The body of `/v1/completions`."""

    prompt: str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=128)]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def chosen(self) -> SamplingParams:
        most = _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.params(most, self.logprobs or 0)


class ChatBody(SamplingBody):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Any] | None = Field(None, max_length=128)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # Not OpenAI's, but vLLM's, by `extra_body`:
    chat_template_kwargs: dict[str, Any] | None = None

    def check_rest(self) -> None:
        """As every body's; refuses what answers cannot be held to."""
        super().check_rest()
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "come with logprobs: true", self.top_logprobs)
        if self.tool_choice not in (None, "auto", "none"):
            raise _not_there(
                "tool_choice", "be auto or none: no call can be forced", self.tool_choice
            )

    @property
    def chat(self) -> dict[str, Any]:
        """The conversation as `Sampler.encode` takes it, checked as a line of data is."""
        tools = self.tools if self.tool_choice != "none" else None
        chat = read_asked(self.messages, tools=tools, variables=self.chat_template_kwargs)
        for index, tool in enumerate(chat.get("tools", ())):
            if tool["function"].get("strict"):
                rule = "be false: arguments are not held to a schema"
                raise _not_there(f"tools[{index}].function.strict", rule, True)
        return chat

    @property
    def chosen(self) -> SamplingParams:
        most = self.max_completion_tokens or self.max_tokens
        return self.params(most, (self.top_logprobs or 0) if self.logprobs else 0)
