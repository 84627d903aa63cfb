"""What the trainer's own forward pass says of a few tokens: a sampler's base is compared with it.

cache/base_scores/KEY.json    written by the first gang that opens a base, once
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
