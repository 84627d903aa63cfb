"""A job's data files: their rows checked, tokenized, and cut to what the job can train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tlora_megatron.config.job import JobSpec, files_in
from tlora_megatron.config.rules import shipped_templates
from tlora_megatron.training.data.contents import raw_rows
from tlora_megatron.training.data.preferences import parse_pair
from tlora_megatron.training.data.rows import Row, learnt_parts, parse_row
from tlora_megatron.training.data.tokenize import (
    TokenSequence,
    count_endless,
    stop_tokens,
    tokenize_rows,
)

logger = logging.getLogger(__name__)

_ROWS_PER_CALL = 1024
"""Lines tokenized at once: enough to feed the tokenizer's threads, few enough to bound memory."""


Read = Callable[[Path, str], bytes]
"""Reads a file that a job names; its second argument is the key and the job, for errors."""


class Contents(NamedTuple):
    """What shapes a job's tokens beside its tokenizer and settings."""

    files: tuple[bytes, ...]
    template: str | None
    """Chat template instead of the tokenizer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFile:
    """A key's sequences, none longer than the job's max_seq_len or without a target."""

    sequences: Sequence[TokenSequence]
    num_truncated: int
    """Sequences, or pairs, that were cut to max_seq_len and kept."""
    num_dropped: int
    """Sequences, or pairs, left out because the cut left no target."""
    num_endless: int = 0
    """Answers of chats that no token ends which stops generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonlFile:
    """The files of one key of one job, in order."""

    job: JobSpec
    key: str
    """The configuration key that names the files."""
    paths: tuple[Path, ...]

    @property
    def where(self) -> str:
        """Job and files, for errors."""
        return self._where(*self.paths)

    def _where(self, *paths: Path) -> str:
        return f"job {self.job.name!r}, {' and '.join(map(str, paths))}"

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

    def read(self, read: Read | None = None) -> Contents:
        """The files' contents, and the chat template that the job names.

        Args:
            read: opens a path; None: as this process may.

        Raises:
            ValueError: naming job and file, if one cannot be read.
        """

        def content(path: Path, key: str) -> bytes:
            try:
                return read(path, f"{key} of job {self.job.name!r}") if read else path.read_bytes()
            except OSError as error:
                raise ValueError(
                    f"{key} must be a readable file, got {error.strerror}: {self._where(path)}"
                ) from error

        files = tuple(content(path, self.key) for path in self.paths)
        named, key = self.job.data.chat_template, "data.chat_template"
        if named is None:
            return Contents(files, None)
        shipped = shipped_templates().get(named)
        found = shipped.read_bytes() if shipped else content(Path(named), key)
        try:
            return Contents(files, found.decode("utf-8"))
        except UnicodeDecodeError as error:
            where = self._where(Path(named))
            raise ValueError(f"{key} must be UTF-8, got {error}: {where}") from error

    def raw_rows(self, contents: Contents) -> Iterator[tuple[Any, str]]:
        """Yields what `parse_row` takes of each row, and where it is.

        Raises:
            ValueError: naming job and file, if one is damaged or holds no row.
        """
        for path, content in zip(self.paths, contents.files, strict=True):
            rows, where = 0, self._where(path)
            for rows, raw in enumerate(raw_rows(content, where), start=1):  # noqa: B007
                yield raw
            if not rows:
                raise ValueError(f"{self.key} must hold at least one line, got none: {where}")

    def tokenize(self, contents: Contents, tokenizer: Any, vocab_size: int) -> LoadedFile:
        """All sequences of the file that fit the job and the model; as `load`, without a warning.

        Raises:
            ValueError: as `load` does.
        """
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer must have an EOS token, got none: job {self.job.name!r}"
            )
        rows = [row for raw in self.raw_rows(contents) for row in self.parse(*raw)]
        kept: list[TokenSequence] = []
        num_truncated = num_dropped = num_endless = 0
        sides, is_cut = self.job.num_sides, False
        stops = stop_tokens(tokenizer)
        for begin in range(0, len(rows), _ROWS_PER_CALL):
            chunk = rows[begin : begin + _ROWS_PER_CALL]
            made = tokenize_rows(chunk, tokenizer, contents.template)
            example: list[TokenSequence] = []
            for number, (row, whole) in enumerate(zip(chunk, made, strict=True), start=1):
                _check_sequence(whole, vocab_size, row.where)
                if row.kind == "messages":
                    num_endless += count_endless(whole, tokenizer, stops)
                parts = self._fit(whole, row)
                is_cut = is_cut or (len(parts) == 1 and parts[0] is not whole)
                example += parts
                if number % sides == 0:  # a pair of which one side has no target goes whole
                    if len(example) < sides:
                        num_dropped += 1
                    else:
                        kept += example
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
            num_dropped=num_dropped,
            num_endless=num_endless,
        )

    def warn(self, loaded: LoadedFile) -> None:
        """Tells in the log how many sequences were cut or left out, and what never ends."""
        if loaded.num_endless:
            logger.warning(
                "%s: the chat template ends %d answers with no token that stops generation; "
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

    def parse(self, raw: Any, where: str) -> list[Row]:
        """The rows of a line: one, two of a pair, or one for each answer of a chat."""
        if self.job.preference is None:
            return learnt_parts(parse_row(raw, where), self.job.data.learn)
        return list(parse_pair(raw, where))

    def _fit(self, sequence: TokenSequence, row: Row) -> list[TokenSequence]:
        """The sequence, cut to max_seq_len or split; none if no target is left."""
        limit, length = self.job.max_seq_len, len(sequence.tokens)
        if length <= limit:
            return [sequence]
        if self.job.data.overlong == "split" and row.kind == "text":
            return _split(sequence, limit)
        if self.job.data.overlong != "truncate":
            also = "" if self.job.data.overlong == "error" else ", split is for text alone"
            raise ValueError(
                f"a sequence must have at most max_seq_len {limit} tokens, got {length}: "
                f"{row.where}; data.overlong: truncate cuts it{also}"
            )
        if not sequence.is_target[:limit].any():
            return []
        # Copies, so that the part cut off is not kept in memory.
        return [TokenSequence(sequence.tokens[:limit].copy(), sequence.is_target[:limit].copy())]


def files_of(job: JobSpec) -> tuple[JsonlFile, JsonlFile | None]:
    """The job's training files, and its evaluation files if it has some."""
    train, evaluation = (
        JsonlFile(job=job, key=f"data.{key}", paths=tuple(map(Path, files_in(value))))
        for key, value in (("train", job.data.train), ("eval", job.data.eval))
    )
    return train, evaluation if evaluation.paths else None


def _split(sequence: TokenSequence, limit: int) -> list[TokenSequence]:
    """Documents of at most `limit` tokens, which learn each token once.

    Each begins with the token that ended the one before, as what its first target follows.
    """
    parts = []
    for begin in range(0, len(sequence.tokens) - 1, limit - 1):
        part = TokenSequence(*(values[begin : begin + limit].copy() for values in sequence))
        part.is_target[0] = False
        parts.append(part)
    return parts


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
