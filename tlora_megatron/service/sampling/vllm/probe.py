"""Asks somebody else's vLLM of its base, and refuses one that is not the base that trains."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tlora_megatron.files import read_json
from tlora_megatron.runtime.sampling.values import Answer, Prompt, SamplingParams
from tlora_megatron.service.home import Home
from tlora_megatron.service.sampling.likeness import (
    MOST_TOKENS,
    TEXT,
    BaseScores,
    Found,
    dtype_of_logits,
    read_scores,
    scores_file,
    unlike,
)
from tlora_megatron.service.sampling.sampler import SamplingRefused

logger = logging.getLogger(__name__)

_TOP = 20
Get = Callable[[str], Awaitable[Mapping[str, Any]]]
"""Asks a path of the server; gives an empty answer where it tells nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSettings:
    """How a server that runs already is looked at."""

    home: Home
    may_differ: bool = False
    """Samples from an unlike server, too; it is told all the same."""
    say: Callable[[str], None] = lambda _: None
    """Is told what was found, on a thread."""


class Probe:
    """Looks at each base of a server once, and again when the trainer has scored its tokens.

    Args:
        generate: samples from the server.
        encode: makes tokens of a text.
        get: asks the server something.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        generate: Callable[[str, Prompt], Awaitable[Answer]],
        encode: Callable[[str, str], Awaitable[list[int]]],
        get: Get,
    ) -> None:
        self._settings = settings
        self._generate = generate
        self._encode = encode
        self._get = get
        self._verdicts: dict[tuple[Path, bool], str | None] = {}
        """Why a base is refused, by its file of scores and by whether that was there."""
        self._lock = asyncio.Lock()

    async def check(self, name: str, base: Mapping[str, Any]) -> None:
        """Lets a base pass, or refuses it.

        Args:
            name: under which the server offers it.
            base: the section `base_model`.

        Raises:
            SamplingRefused: if the server's is unlike it.
        """
        file = await asyncio.to_thread(scores_file, self._settings.home, base)
        async with self._lock:  # all that ask at once wait for the same answer
            key = file, await asyncio.to_thread(file.exists)
            if key not in self._verdicts:
                self._verdicts[key] = await self._judge(name, base)
        if (refusal := self._verdicts[key]) is not None:
            raise SamplingRefused(refusal)

    async def _judge(self, name: str, base: Mapping[str, Any]) -> str | None:
        scores = await asyncio.to_thread(read_scores, self._settings.home, base)
        found = await self._look(name, scores)
        held = await asyncio.to_thread(_quantization, base)
        wrong = unlike(base, held, found)
        told = f"the sampler's {name}: {found.sentence()}"
        if wrong:
            told += f"; unlike the base that trains: {'; '.join(wrong)}"
        logger.warning("%s", told)
        await asyncio.to_thread(self._settings.say, told)
        if not wrong or self._settings.may_differ:
            return None
        return (
            f"the sampler's {name} must be as the base that trains: {'; '.join(wrong)}. Start its "
            f"server with --dtype {base['dtype']} on the same folder, or the service with "
            "--sampler-may-differ"
        )

    async def _look(self, name: str, scores: BaseScores | None) -> Found:
        tokens = list(scores.tokens) if scores else (await self._encode(name, TEXT))[:MOST_TOKENS]
        answer = await self._generate(name, _scored(tokens))
        assert answer.prompt_logprobs is not None, "they were asked for"
        rows = [[pair.logprob for pair in row] for row in answer.top_prompt_logprobs or () if row]
        dtype, quantization = await self._told(name)
        return Found(
            told_dtype=dtype,
            told_quantization=quantization,
            seen_dtype=await asyncio.to_thread(dtype_of_logits, rows),
            gap=None if scores is None else scores.gap(answer.prompt_logprobs),
        )

    async def _told(self, name: str) -> tuple[str | None, str | None]:
        """Dtype and quantisation by the server's own words, which it has in its dev mode alone.

        Without them the folder that it serves says how it is quantised, if it is seen from here.
        """
        info = await self._get("/server_info?config_format=json")
        config = info.get("vllm_config")
        told = config.get("model_config") if isinstance(config, Mapping) else None
        if isinstance(told, Mapping) and "dtype" in told:
            dtype = str(told["dtype"]).removeprefix("torch.")
            return dtype, str(told.get("quantization") or "none")
        models = (await self._get("/v1/models")).get("data") or ()
        roots = [model.get("root") for model in models if model.get("id") == name]
        look = partial(_quantization, {"path": roots[0] if roots else None})
        return None, await asyncio.to_thread(look)


def _scored(tokens: list[int]) -> Prompt:
    params = SamplingParams(max_tokens=0)
    return Prompt(
        tokens=tuple(tokens), params=params, prompt_logprobs=True, top_prompt_logprobs=_TOP
    )


def _quantization(base: Mapping[str, Any]) -> str | None:
    """How a base is quantised, by its section or its folder; None if that cannot be seen."""
    if base.get("quantization"):
        return str(base["quantization"])
    folder = base.get("path")
    config = None if folder is None else read_json(Path(str(folder)) / "config.json")
    if not isinstance(config, Mapping):
        return None
    return str((config.get("quantization_config") or {}).get("quant_method", "none"))
