"""The data of one job: its JSONL files as token sequences, and which of them each step takes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tlora_megatron.config.job import JobSpec
from tlora_megatron.training.data.tokenize import (
    ROLES,
    Row,
    RowKind,
    TokenSequence,
    fingerprint,
    load_tokenizer,
    tokenize_rows,
)

__all__ = ["BatchPlan", "JobData", "TokenSequence", "load_job_data", "load_tokenizer"]

logger = logging.getLogger(__name__)

_KEYS: dict[RowKind, tuple[str, ...]] = {
    "completion": ("prompt", "completion"),
    "messages": ("messages",),
    "text": ("text",),
}
_ROWS_PER_CALL = 1024
"""Lines tokenized at once: enough to feed the tokenizer's threads, few enough to bound memory."""


@dataclass(frozen=True, kw_only=True)
class JobData:
    """A job's sequences, none longer than its max_seq_len and none without a target."""

    train: tuple[TokenSequence, ...]
    eval: tuple[TokenSequence, ...]
    """Empty if the job has no evaluation file."""
    num_truncated: int
    """Sequences of both files that were cut to max_seq_len and kept."""
    num_dropped: int
    """Sequences of both files left out because the cut left no target."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the training sequences; kept, since it reads all of them."""
        return fingerprint(self.train)


def load_job_data(job: JobSpec, tokenizer: Any, vocab_size: int) -> JobData:
    """Reads, checks and tokenizes a job's training and evaluation files.

    Args:
        tokenizer: the base model's Hugging Face tokenizer.
        vocab_size: rows of the base model's embedding; every token id is below it.

    Raises:
        ValueError: naming job, file and line, if a file or a line of it cannot be used, or the
            tokenizer has no EOS.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer must have an EOS token, got none: job {job.name!r}")
    train = _JsonlFile(job=job, key="data.train", path=Path(job.data.train))
    loaded = [train.load(tokenizer, vocab_size)]
    if job.data.eval is not None:
        evaluation = _JsonlFile(job=job, key="data.eval", path=Path(job.data.eval))
        loaded.append(evaluation.load(tokenizer, vocab_size))
    return JobData(
        train=loaded[0].sequences,
        eval=loaded[1].sequences if len(loaded) > 1 else (),
        num_truncated=sum(part.num_truncated for part in loaded),
        num_dropped=sum(part.num_dropped for part in loaded),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _LoadedFile:
    sequences: tuple[TokenSequence, ...]
    num_truncated: int
    num_dropped: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _JsonlFile:
    """One file of one job."""

    job: JobSpec
    key: str
    """The configuration key that names the file."""
    path: Path

    @property
    def where(self) -> str:
        """Job and file, for errors."""
        return f"job {self.job.name!r}, {self.path}"

    def load(self, tokenizer: Any, vocab_size: int) -> _LoadedFile:
        """All sequences of the file that fit the job and the model."""
        rows = list(self._rows())
        if not rows:
            raise ValueError(f"{self.key} must hold at least one line, got none: {self.where}")
        kept: list[TokenSequence] = []
        num_truncated = 0
        for begin in range(0, len(rows), _ROWS_PER_CALL):
            chunk = rows[begin : begin + _ROWS_PER_CALL]
            for row, whole in zip(chunk, tokenize_rows(chunk, tokenizer), strict=True):
                _check_sequence(whole, vocab_size, row.where)
                sequence = self._fit(whole, row.where)
                if sequence is not None:
                    kept.append(sequence)
                    num_truncated += sequence is not whole
        num_dropped = len(rows) - len(kept)
        self._report(len(rows), num_truncated, num_dropped)
        return _LoadedFile(
            sequences=tuple(kept), num_truncated=num_truncated, num_dropped=num_dropped
        )

    def _rows(self) -> Iterator[Row]:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"{self.key} must be a readable file, got {error.strerror}: {self.where}"
            ) from error
        # Not splitlines: JSON strings may hold U+2028 and other breaks as they are.
        for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            if line.strip():
                yield _parse_row(line, f"{self.where} line {number}")

    def _fit(self, sequence: TokenSequence, where: str) -> TokenSequence | None:
        """The sequence cut to max_seq_len; None if no target is left."""
        limit, length = self.job.max_seq_len, len(sequence.tokens)
        if length <= limit:
            return sequence
        if self.job.data.overlong == "error":
            raise ValueError(
                f"a sequence must have at most max_seq_len {limit} tokens, got {length}: {where}; "
                f"data.overlong: truncate cuts it"
            )
        if not sequence.is_target[:limit].any():
            return None
        # Copies, so that the part cut off is not kept in memory.
        return TokenSequence(sequence.tokens[:limit].copy(), sequence.is_target[:limit].copy())

    def _report(self, num_rows: int, num_truncated: int, num_dropped: int) -> None:
        limit = self.job.max_seq_len
        if num_dropped == num_rows:
            raise ValueError(
                f"{self.key} must hold at least one sequence with a target in its first "
                f"max_seq_len {limit} tokens, got {num_rows} without: {self.where}"
            )
        if num_truncated or num_dropped:
            logger.warning(
                "%s: %d of %d sequences cut to max_seq_len %d, %d more dropped with no target left",
                self.where, num_truncated, num_rows, limit, num_dropped,
            )  # fmt: skip


def _check_sequence(sequence: TokenSequence, vocab_size: int, where: str) -> None:
    largest = int(sequence.tokens.max(initial=0))
    if largest >= vocab_size:
        raise ValueError(
            f"token id must be below the model's vocabulary {vocab_size}, got {largest}: {where}; "
            f"the tokenizer does not fit the base model"
        )
    if not sequence.is_target.any():
        raise ValueError(
            f"a line must give at least one token to learn after its first, "
            f"got {len(sequence.tokens)} tokens and no target: {where}"
        )


def _parse_row(line: bytes, where: str) -> Row:
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"a line must be UTF-8, got {error}: {where}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a line must be JSON, got {error}: {where}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a line must be a JSON object, got {type(fields).__name__}: {where}")
    kinds = [kind for kind, keys in _KEYS.items() if any(key in fields for key in keys)]
    if len(kinds) != 1 or any(key not in fields for key in _KEYS[kinds[0]]):
        raise ValueError(
            f"a line must hold prompt and completion, or messages, or text, "
            f"got the keys {sorted(fields)}: {where}"
        )
    kind = kinds[0]
    if kind == "messages":
        _check_messages(fields["messages"], where)
    else:
        for key in _KEYS[kind]:
            _check_text(fields[key], key, where)
    return Row(kind, fields, where)


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a non-empty list, got {messages!r:.80}: {where}")
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"{name} must hold role and content, got {message!r:.80}: {where}")
        if message["role"] not in ROLES:
            raise ValueError(
                f"{name}.role must be one of {', '.join(ROLES)}, "
                f"got {message['role']!r:.80}: {where}"
            )
        _check_text(message["content"], f"{name}.content", where)


def _check_text(value: Any, name: str, where: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {value!r:.80}: {where}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be Unicode text, got {error}: {where}") from error


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Says which sequences each optimizer step takes, as a pure function of the step.

    The job's stream is one permutation of its sequences after another, that of epoch e drawn from
    (seed, e) alone, and batches are consecutive cuts of the stream. So a step needs no state to be
    resumed, and the order does not depend on the job's neighbours. With `max_steps` every batch is
    full and may cross epochs; with `epochs` the last batch may be smaller.
    """

    num_sequences: int
    batch_size: int
    seed: int
    max_steps: int | None = None
    epochs: int | None = None
    _orders: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Permutations of the last two epochs used."""

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError(
                f"exactly one of max_steps and epochs must be set, "
                f"got {self.max_steps} and {self.epochs}"
            )
        for name in ("num_sequences", "batch_size", "max_steps", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @classmethod
    def for_job(cls, job: JobSpec, num_sequences: int) -> BatchPlan:
        """The plan of a job over its `num_sequences` training sequences."""
        return cls(num_sequences, job.batch_size, job.seed, job.max_steps, job.epochs)

    @property
    def num_steps(self) -> int:
        """Optimizer steps until the job ends."""
        return -(-self._stream_length // self.batch_size)

    @property
    def num_epochs(self) -> float:
        """Passes over the data until the job ends."""
        return self._stream_length / self.num_sequences

    @property
    def _stream_length(self) -> int:
        if self.epochs is not None:
            return self.epochs * self.num_sequences
        assert self.max_steps is not None, "checked at construction"
        return self.max_steps * self.batch_size

    def indices(self, step: int) -> tuple[int, ...]:
        """Indices of the training sequences in the batch of `step`, counted from 0.

        Raises:
            IndexError: if the job has no such step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step must be in [0, {self.num_steps}), got {step}")
        begin = step * self.batch_size
        end = min(begin + self.batch_size, self._stream_length)
        places = (divmod(place, self.num_sequences) for place in range(begin, end))
        return tuple(int(self._order(epoch)[offset]) for epoch, offset in places)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
            self._orders[epoch] = np.random.Generator(bits).permutation(self.num_sequences)
        return self._orders[epoch]
