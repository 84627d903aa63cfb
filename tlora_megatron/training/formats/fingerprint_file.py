"""The fingerprint of a base: the log-probabilities that it gives to a fixed text.

A model that was built from the same weights with other arguments (rotary base, epsilon of the
norms, ...) gives other ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "base_fingerprint.json"
_FORMAT = 1
_NUM_TOKENS = 512
_BLOCK = 32
_LEAST_SPREAD = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """A base model's log-probabilities of a fixed sequence of tokens."""

    vocab_size: int
    tokens: tuple[int, ...]
    """The text; shorter than usual where the model's positions or window end before."""
    log_probs: tuple[float, ...]
    """Log-probability of every token but the first, given those before it; in fp32."""
    bf16_error: float
    """`relative_error` of the same model with everything rounded to bfloat16."""

    @property
    def spread(self) -> float:
        """Standard deviation of the log-probabilities."""
        return max(statistics.pstdev(self.log_probs), _LEAST_SPREAD)


def fingerprint_tokens(
    vocab_size: int, max_positions: int, sliding_window: int | None
) -> tuple[int, ...]:
    """The text for a vocabulary: low ids, which stand for frequent words, more often than high.

    Every fourth block of 32 tokens repeats an earlier one, 96 to 288 tokens before: copying is what
    language models do by position, so that wrong positions show.
    """
    tokens: list[int] = []
    for block in range(_NUM_TOKENS // _BLOCK):
        if block % 4 == 3:
            begin = (block - 3) // 2 * _BLOCK
            tokens += tokens[begin : begin + _BLOCK]
        else:
            tokens += [_token(block * _BLOCK + i, vocab_size) for i in range(_BLOCK)]
    return tuple(tokens[: min(_NUM_TOKENS, max_positions, sliding_window or _NUM_TOKENS)])


def _token(index: int, vocab_size: int) -> int:
    digest = hashlib.sha256(f"tlora fingerprint {index}".encode()).digest()
    uniform = int.from_bytes(digest[:7], "little") / 2**56
    return int(uniform * uniform * vocab_size)


def write_fingerprint(folder: Path, fingerprint: Fingerprint) -> None:
    """Writes the file into a folder."""
    document = {"format": _FORMAT, **asdict(fingerprint)}
    (folder / FILE_NAME).write_text(json.dumps(document))


def read_fingerprint(folder: Path) -> Fingerprint | None:
    """Reads a folder's fingerprint; None if it has none."""
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} must be a fingerprint that `tlora convert` wrote for this base, got {error}; "
            f"convert the base again, or delete the file to train unchecked"
        ) from error


def _parse(document: dict[str, Any]) -> Fingerprint:
    if document["format"] != _FORMAT:
        raise ValueError(f"format {document['format']}")
    found = Fingerprint(
        vocab_size=int(document["vocab_size"]),
        tokens=tuple(map(int, document["tokens"])),
        log_probs=tuple(map(float, document["log_probs"])),
        bf16_error=float(document["bf16_error"]),
    )
    if len(found.tokens) != len(found.log_probs) + 1 or len(found.tokens) < 3:
        raise ValueError(f"{len(found.tokens)} tokens, {len(found.log_probs)} log-probabilities")
    if not all(0 <= token < found.vocab_size for token in found.tokens):
        raise ValueError(f"token {max(found.tokens)} of {found.vocab_size}")
    if not all(map(math.isfinite, (*found.log_probs, found.bf16_error))):
        raise ValueError("numbers that are not finite")
    return found
