"""Asks somebody else's vLLM of its base, and refuses one that is not the base that trains.

cache/base_scores/KEY.json    written by the first gang that opens a base, once

A 16-bit model multiplies its head in 16 bits, too, so all its logits are numbers of 8 (bfloat16) or
11 (float16) significant bits. Log-probabilities of one place differ by what logits differ, and vLLM
tells them in fp32: whether logits lie on such a grid can be seen without a word of the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tlora_megatron.files import read_json, write_json
from tlora_megatron.runtime.sampling.values import Answer, Prompt, SamplingParams
from tlora_megatron.service.home import Home, make_folder
from tlora_megatron.service.sampling.sampler import SamplingRefused

TEXT = (
    "In 1687 Newton published three laws of motion. The first says that a body stays at rest, or "
    "moves on in a straight line, unless a force acts on it. def area(r): return 3.14159 * r ** 2"
)
"""Is scored: likely tokens, as those of a text are to a trained base, show the least rounding."""
MOST_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseScores:
    """Log-probabilities of tokens under a base that is trained on, each under those before it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """of all but the first"""

    def gap(self, logprobs: tuple[float | None, ...]) -> tuple[float, float]:
        """Mean and maximum of the differences from others' log-probabilities, without the first."""
        others = [float("nan") if value is None else value for value in logprobs[1:]]
        gaps = [abs(own - other) for own, other in zip(self.logprobs, others, strict=True)]
        return sum(gaps) / len(gaps), max(gaps)


def read_scores(home: Home, base: Mapping[str, Any]) -> BaseScores | None:
    """The scores of a base; None if no gang has opened it since it is what it is."""
    found = read_json(scores_file(home, base))
    if found is None:
        return None
    return BaseScores(tokens=tuple(found["tokens"]), logprobs=tuple(found["logprobs"]))


def write_scores(home: Home, base: Mapping[str, Any], scores: BaseScores) -> None:
    file = scores_file(home, base)
    make_folder(file.parent)
    write_json(file, asdict(scores))


def scores_file(home: Home, base: Mapping[str, Any]) -> Path:
    """The file of a base, by its section `base_model` and the weights that its folder holds now."""
    section = {key: value for key, value in base.items() if key != "allow_change"}
    files = [] if base.get("path") is None else sorted(Path(base["path"]).glob("*.safetensors"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    known = json.dumps([section, stats], sort_keys=True)
    name = hashlib.sha256(known.encode()).hexdigest()[:24]
    return home.root / "cache" / "base_scores" / f"{name}.json"


_BITS = {"bfloat16": 8, "float16": 11}
_LARGEST_LOGIT = 6
"""As a power of two; likeliest tokens' logits are below 64, or as good as."""
_OFF_GRID = 2e-5
"""Of a log-probability in fp32 down to -60, with its sum: 4 units in the last place, 4e-6 each."""
_FITTING = 0.9
"""Share of places: more may not be on a grid only by a likeliest token beyond all limits above."""
_SPREAD, _TOKENS = 0.5, 8
"""Places with less difference between tokens, or with fewer of them, show nothing."""
_MOST_GAP: Mapping[str, tuple[str, float]] = {
    "float32": ("max", 1e-3),
    "bfloat16": ("mean", 0.05),
}
"""Measured on the quickstart's base: fp32 servers differ by 1e-5 at most; of the probed text in the
mean bf16 rounding makes 0.016, FP8 weights 0.08, int4 0.37. int8 by rows makes 0.027 and passes.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What is known of a server's copy of a base; None = it cannot be told."""

    told_dtype: str | None = None
    """by the server itself"""
    told_quantization: str | None = None
    """by the server itself; "none" = it holds the weights as they are"""
    seen_dtype: str | None = None
    """by its logits"""
    gap: tuple[float, float] | None = None
    """mean and maximum of differences from the trainer's log-probabilities"""

    def sentence(self) -> str:
        unknown = "unknown"
        gap = "not compared with the trainer's log-probabilities: no gang has opened the base yet"
        if self.gap is not None:
            gap = f"log-probabilities {self.gap[0]:.2g} from the trainer's in the mean, "
            gap += f"{self.gap[1]:.2g} at most"
        return (
            f"dtype {self.told_dtype or unknown} by its words and {self.seen_dtype or unknown} by "
            f"its logits, quantisation {self.told_quantization or unknown}, {gap}"
        )


def unlike(base: Mapping[str, Any], quantization: str | None, found: Found) -> list[str]:
    """What of a server is not as the section `base_model` and its quantization, a clause each."""
    dtype, held = str(base["dtype"]), quantization or "none"
    wrong = [
        f"dtype must be {dtype}, got {other} {how}"
        for other, how in ((found.told_dtype, "by its words"), (found.seen_dtype, "by its logits"))
        if other not in (None, dtype)
    ]
    if found.told_quantization not in (None, held):
        wrong.append(f"quantisation must be {held}, got {found.told_quantization}")
    kind, most = _MOST_GAP[dtype]
    if found.gap is not None and not found.gap[kind == "max"] <= most:
        wrong.append(
            f"log-probabilities must be within {most:g} of the trainer's in the {kind}, got "
            f"{found.gap[0]:.2g} in the mean and {found.gap[1]:.2g} at most"
        )
    return wrong


def dtype_of_logits(places: Sequence[Sequence[float]]) -> str | None:
    """The dtype of the logits that log-probabilities were made of; None if they do not show it.

    float16 is told as bfloat16 where few tokens are likely; fp32 is never told as either. 20 of
    each place's likeliest tokens do, as fp32 gave them.
    """
    rows = [np.sort(np.asarray(row, np.float64))[::-1] for row in places]
    rows = [row for row in rows if len(row) >= _TOKENS and row[0] - row[-1] >= _SPREAD]
    if not rows:
        return None
    for dtype, bits in _BITS.items():
        if np.mean([_is_on_grid(row, bits) for row in rows]) >= _FITTING:
            return dtype
    return "float32"


def _is_on_grid(row: np.ndarray, bits: int) -> bool:
    """True if some likeliest logit makes all logits numbers of so many significant bits."""
    tops_C = _numbers(bits)
    logits_CK = tops_C[:, None] - (row[0] - row)[None, :]
    _, exponents_CK = np.frexp(logits_CK)
    units_CK = np.ldexp(1.0, exponents_CK - bits)
    off_CK = np.abs(logits_CK - np.round(logits_CK / units_CK) * units_CK)
    return bool((off_CK.max(axis=1) < _OFF_GRID).any())


def _numbers(bits: int) -> np.ndarray:
    """All numbers of so many significant bits from 1/64 to the largest logit, of both signs."""
    mantissas = np.arange(2 ** (bits - 1), 2**bits, dtype=np.float64)
    exponents = np.arange(-_LARGEST_LOGIT, _LARGEST_LOGIT) + 1
    positive = np.ldexp(mantissas[None, :], (exponents - bits)[:, None]).ravel()
    return np.concatenate([positive, -positive])


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
    """Looks at each base of a server once, and again when the trainer has scored its tokens."""

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
        """Lets a base pass; raises `SamplingRefused` if the server's is unlike it."""
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
        prompt = Prompt(
            tokens=tuple(tokens),
            params=SamplingParams(max_tokens=0),
            prompt_logprobs=True,
            top_prompt_logprobs=_TOP,
        )
        answer = await self._generate(name, prompt)
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
        """Dtype and quantisation by the server's words in its dev mode, or by its folder."""
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


def _quantization(base: Mapping[str, Any]) -> str | None:
    """How a base is quantised, by its section or its folder; None if that cannot be seen."""
    if base.get("quantization"):
        return str(base["quantization"])
    folder = base.get("path")
    config = None if folder is None else read_json(Path(str(folder)) / "config.json")
    if not isinstance(config, Mapping):
        return None
    return str((config.get("quantization_config") or {}).get("quant_method", "none"))
