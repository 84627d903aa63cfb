"""Tells whether somebody else's server samples from a base as it is trained: its dtype, its gap.

cache/base_scores/KEY.json    written by the first gang that opens a base, once

A 16-bit model multiplies its head in 16 bits, too, so all its logits are numbers of 8 (bfloat16) or
11 (float16) significant bits. Log-probabilities of one place differ by what logits differ, and vLLM
tells them in fp32: whether logits lie on such a grid can be seen without a word of the server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tlora_megatron.files import read_json, write_json
from tlora_megatron.service.home import Home, make_folder

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
        """Mean and maximum of the differences from another one's log-probabilities.

        Args:
            logprobs: of all tokens; the first one's is nobody's business.
        """
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
    """Keeps the scores of a base."""
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
        """All of it."""
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
    """What of a server is not as the base that trains, a clause each.

    Args:
        base: the section `base_model`.
        quantization: of the base, also one that its folder was published in.
    """
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

    float16 is told as bfloat16 where few tokens are likely: then the finer grid's numbers happen to
    lie on the coarser one. fp32 is never told as either.

    Args:
        places: the likeliest tokens' log-probabilities, as fp32 gave them; 20 of each place do.
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
