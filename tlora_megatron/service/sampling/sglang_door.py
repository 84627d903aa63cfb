"""A server of SGLang, asked in its own words for what vLLM's are asked for.

Whoever asks speaks vLLM's form of a completion; here it becomes `/generate`, and the answer
choices. Each sample is a prompt of its own with a seed of its own: SGLang draws the same for all
samples of one seed. Its wire is that of SGLang's documentation; no SGLang has run behind it here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from tlora_megatron.service.sampling.sampler import SamplingRefused
from tlora_megatron.service.sampling.vllm_door import PREFIX, Door

_SEEDS = 1 << 62


class SglangDoor(Door):
    """A server whose adapters are loaded from folders and are asked for by `lora_path`."""

    kind = "SGLang"
    load_path, unload_path = "/load_lora_adapter", "/unload_lora_adapter"
    is_loaded, is_missing = "already exists", "are not loaded"
    _models: Collection[str] = ()

    def check_serves(self, base: str) -> None:
        """Refuses a base that is not the server's, which SGLang does not look at."""
        if base not in self._models:
            names = ", ".join(sorted(self._models))
            rule = f"base must be what SGLang serves at {self.server.address}, {names}"
            raise SamplingRefused(f"{rule}, got {base}")

    async def models(self) -> list[str]:
        found = await super().models()
        self._models = {name for name in found if not name.startswith(PREFIX)}
        return found

    async def answers(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        if path == "/detokenize":
            asked = {**body, "skip_special_tokens": False}
            async for answer in super().answers(path, asked):
                yield {"prompt": answer["text"]}
        elif path == "/tokenize":
            async for answer in super().answers(path, body):
                yield answer
        else:
            told, texts = Counter[int](), Counter[int]()
            name = str(body["model"])
            asked = to_generate(body, name if name.startswith(PREFIX) else None)
            async for answer in super().answers("/generate", asked):
                found = answer if isinstance(answer, list) else [answer]
                choices = []
                for place, one in enumerate(found):
                    index = one.get("index", place)
                    choices.append(_choice(one, index, told[index], texts[index]))
                    told[index] += len(choices[-1]["token_ids"])
                    texts[index] += len(choices[-1]["text"])
                yield {"choices": choices}


def to_generate(body: Mapping[str, Any], adapter: str | None) -> dict[str, Any]:
    """The body of `/generate` that asks for what a body of vLLM's completions asks for."""
    count, scores = body.get("n", 1), "prompt_logprobs" in body
    params = {
        "max_new_tokens": body["max_tokens"],
        "temperature": body.get("temperature", 1.0),
        "top_p": body.get("top_p", 1.0),
        "top_k": body.get("top_k") or -1,
        **{
            name: body[name]
            for name in (
                *("presence_penalty", "frequency_penalty"),
                *("stop", "stop_token_ids", "ignore_eos"),
            )
            if name in body
        },
    }
    seed = body.get("seed")
    seeds = [{} if seed is None else {"sampling_seed": (seed + i) % _SEEDS} for i in range(count)]
    return {
        "input_ids": [body["prompt"]] * count,
        "sampling_params": [params | one for one in seeds],
        "lora_path": [adapter] * count,
        "return_logprob": True,
        "top_logprobs_num": max(body.get("logprobs") or 0, body.get("prompt_logprobs") or 0),
        "logprob_start_len": 0 if scores else -1,
        "stream": body.get("stream", False),
    }


def _choice(answer: Mapping[str, Any], index: int, told: int, text: int) -> dict[str, Any]:
    """What an answer, which holds all tokens so far, adds to those that were told, as a choice.

    Args:
        text: characters that were told.
    """
    meta = answer["meta_info"]
    tokens = meta["output_token_logprobs"][told:]
    reason = meta.get("finish_reason") or {}
    tops = (meta.get("output_top_logprobs") or [])[told:]
    choice: dict[str, Any] = {
        "index": index,
        "text": answer["text"][text:],
        "token_ids": [token for _, token, *_ in tokens],
        "finish_reason": reason.get("type"),
        "stop_reason": reason.get("matched"),
        "logprobs": {
            "token_logprobs": [logprob for logprob, *_ in tokens],
            "top_logprobs": [_row(top, "token_id:") for top in tops],
        },
    }
    if scored := meta.get("input_token_logprobs"):
        rows = [_row([pair]) for pair in scored[1:]]
        for row, top in zip(rows, (meta.get("input_top_logprobs") or [])[1:], strict=False):
            row |= _row(top)
        prompt = [{key: {"logprob": value} for key, value in row.items()} for row in rows]
        choice["prompt_logprobs"] = [None, *prompt]
    return choice


def _row(pairs: Sequence[Sequence[Any]] | None, prefix: str = "") -> dict[str, float]:
    return {f"{prefix}{token}": float(logprob) for logprob, token, *_ in pairs or ()}
