"""One JSONL file of a job: its lines checked, tokenized, and cut to what the job can train."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora_megatron.config.job import JobSpec
from tlora_megatron.training.data.preferences import parse_pair
from tlora_megatron.training.data.rows import Row, parse_row
from tlora_megatron.training.data.tokenize import (
    TokenSequence,
    count_endless,
    stop_tokens,
    tokenize_rows,
)

logger = logging.getLogger(__name__)

_ROWS_PER_CALL = 1024
"""Lines tokenized at once: enough to feed the tokenizer's threads, few enough to bound memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFile:
    """The sequences of one file, none longer than the job's max_seq_len or without a target."""

    sequences: Sequence[TokenSequence]
    num_truncated: int
    """Sequences, or pairs, that were cut to max_seq_len and kept."""
    num_dropped: int
    """Sequences, or pairs, left out because the cut left no target."""
    num_endless: int = 0
    """Answers of chats that no token ends which stops generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonlFile:
    """One file of one job."""

    job: JobSpec
    key: str
    """The configuration key that names the file."""
    path: Path

    @property
    def where(self) -> str:
        """Job and file, for errors."""
        return f"job {self.job.name!r}, {self.path}"

    @property
    def _what(self) -> str:
        return "sequence" if self.job.preference is None else "pair"

    def load(self, tokenizer: Any, vocab_size: int) -> LoadedFile:
        """Reads and tokenizes the file; warnings tell how much of it was cut, and what
        never ends.

        Args:
            tokenizer: the base model's Hugging Face tokenizer.
            vocab_size: rows of the base model's embedding; every token id is below it.

        Raises:
            ValueError: naming job, file and line, if any cannot be used, or the tokenizer has no
                EOS.
        """
        loaded = self.tokenize(self.read(), tokenizer, vocab_size)
        self.warn(loaded)
        return loaded

    def read(self) -> bytes:
        """The file's content.

        Raises:
            ValueError: naming job and file, if it cannot be read.
        """
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"{self.key} must be a readable file, got {error.strerror}: {self.where}"
            ) from error

    def tokenize(self, content: bytes, tokenizer: Any, vocab_size: int) -> LoadedFile:
        """All sequences of the file that fit the job and the model; as `load`, without a warning.

        Raises:
            ValueError: as `load` does.
        """
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer must have an EOS token, got none: job {self.job.name!r}"
            )
        rows = list(self._rows(content))
        if not rows:
            raise ValueError(f"{self.key} must hold at least one line, got none: {self.where}")
        kept: list[TokenSequence] = []
        num_truncated = num_endless = 0
        sides, is_cut = self.job.num_sides, False
        stops = stop_tokens(tokenizer)
        for begin in range(0, len(rows), _ROWS_PER_CALL):
            chunk = rows[begin : begin + _ROWS_PER_CALL]
            example: list[TokenSequence | None] = []
            for row, whole in zip(chunk, tokenize_rows(chunk, tokenizer), strict=True):
                _check_sequence(whole, vocab_size, row.where)
                if row.kind == "messages":
                    num_endless += count_endless(whole, tokenizer, stops)
                example.append(self._fit(whole, row.where))
                is_cut = is_cut or example[-1] is not whole
                if len(example) == sides:  # a pair of which one side has no target goes whole
                    if None not in example:
                        kept += [sequence for sequence in example if sequence is not None]
                        num_truncated += is_cut
                    example, is_cut = [], False
        if not kept:
            raise ValueError(
                f"{self.key} must hold at least one {self._what} with a target in its first "
                f"max_seq_len {self.job.max_seq_len} tokens, got {len(rows) // sides} without: "
                f"{self.where}"
            )
        return LoadedFile(
            sequences=tuple(kept),
            num_truncated=num_truncated,
            num_dropped=(len(rows) - len(kept)) // sides,
            num_endless=num_endless,
        )

    def warn(self, loaded: LoadedFile) -> None:
        """Tells in the log how many sequences were cut or left out, and what never ends."""
        if loaded.num_endless:
            logger.warning(
                "%s: the base's chat template ends %d answers with no token that stops generation; "
                "a model that learns them does not stop: let the template write the end of an "
                "answer, or name its token as eos_token_id in generation_config.json",
                self.where, loaded.num_endless,
            )  # fmt: skip
        if loaded.num_truncated or loaded.num_dropped:
            logger.warning(
                "%s: %d of %d %ss cut to max_seq_len %d, %d more dropped with no target left",
                self.where, loaded.num_truncated,
                len(loaded.sequences) // self.job.num_sides + loaded.num_dropped, self._what,
                self.job.max_seq_len, loaded.num_dropped,
            )  # fmt: skip

    def _rows(self, content: bytes) -> Iterator[Row]:
        # Not splitlines: JSON strings may hold U+2028 and other breaks as they are.
        for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            if line.strip():
                yield from self.parse(line, number)

    def parse(self, line: bytes, number: int) -> tuple[Row, ...]:
        """The rows of a line that is not empty: one, or two of a pair."""
        where = f"{self.where} line {number}"
        if self.job.preference is None:
            return (parse_row(line, where),)
        return parse_pair(line, where)

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


def files_of(job: JobSpec) -> tuple[JsonlFile, JsonlFile | None]:
    """The job's training file, and its evaluation file if it has one."""
    train = JsonlFile(job=job, key="data.train", path=Path(job.data.train))
    if job.data.eval is None:
        return train, None
    return train, JsonlFile(job=job, key="data.eval", path=Path(job.data.eval))


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
