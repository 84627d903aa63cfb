"""The data of one job as token sequences, which of them each step takes, and their cache.

A file is tokenized once, when its job is validated. After that every process of every gang maps
what was kept: the same bits, without a tokenizer. A damaged entry is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tlora_megatron.config.job import JobSpec
from tlora_megatron.training.data import (
    chats,
    contents,
    forms,
    jsonl_file,
    preferences,
    rows,
    tokenize,
)
from tlora_megatron.training.data.jsonl_file import Contents, JsonlFile, LoadedFile, Read, files_of
from tlora_megatron.training.data.mapped_tokens import (
    DamagedTokens,
    KeptFile,
    map_tokens,
    write_tokens,
)
from tlora_megatron.training.data.tokenize import TokenSequence, fingerprint, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class JobData:
    """A job's sequences, none longer than its max_seq_len and none without a target."""

    train: Sequence[TokenSequence]
    eval: Sequence[TokenSequence]
    """Empty if the job has no evaluation file."""
    num_truncated: int
    """Sequences of both files that were cut to max_seq_len and kept."""
    num_dropped: int
    """Sequences of both files left out because the cut left no target."""
    known_fingerprint: str | None = None
    """Digest of the training sequences, where it was kept with them."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the training sequences; kept, since it reads all of them."""
        return self.known_fingerprint or fingerprint(self.train)

    @classmethod
    def of_files(
        cls, train: LoadedFile, evaluation: LoadedFile | None, fingerprint: str | None = None
    ) -> JobData:
        """Joins what was read from a job's files.

        Args:
            fingerprint: of the training sequences, where it is known.
        """
        files = [train] if evaluation is None else [train, evaluation]
        return cls(
            train=train.sequences,
            eval=() if evaluation is None else evaluation.sequences,
            num_truncated=sum(file.num_truncated for file in files),
            num_dropped=sum(file.num_dropped for file in files),
            known_fingerprint=fingerprint,
        )


def load_job_data(job: JobSpec, tokenizer: Any, vocab_size: int) -> JobData:
    """Reads, checks and tokenizes a job's training and evaluation files.

    Raises:
        ValueError: naming job, file and line, if a file or a line of it cannot be used, or the
            tokenizer has no EOS.
    """
    train, evaluation = files_of(job)
    return JobData.of_files(
        train.load(tokenizer, vocab_size),
        None if evaluation is None else evaluation.load(tokenizer, vocab_size),
    )


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
        """The plan of a job over its `num_sequences` training sequences, or half as many pairs."""
        examples = num_sequences // job.num_sides
        return cls(examples, job.batch_size, job.seed, job.max_steps, job.epochs)

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
        """Indices of the training sequences in the batch of `step`, counted from 0."""
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


logger = logging.getLogger(__name__)

ENTRY_NAME = "tokens.safetensors"
_LIBRARIES = ("transformers", "tokenizers", "jinja2")
_CODE = (tokenize, chats, rows, preferences, forms, contents, jsonl_file)
"""Modules whose own rules shape the tokens."""
_IDLE_S = 30 * 86400.0
"""Entries that no job has asked for in so long are removed."""
_LEFT_S = 86400.0
"""No write takes as long: what a killed one has left is removed."""
_ENDINGS = (".json", ".model", ".txt", ".jinja", ".tiktoken")
_TEMPLATES = "additional_chat_templates"
"""Files of a base's folder, and a folder in it, that a tokenizer may be made from."""


class TokenizerFolder:
    """A base's tokenizer, loaded when somebody needs it, and the digest of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer; the last few of a process stay loaded."""
        return _load_tokenizer(self.folder, self.digest)

    @cached_property
    def digest(self) -> str:
        """Digest of a tokenizer's files, and of the libraries and code that read them."""
        found = hashlib.sha256()
        for path in sorted([*self.folder.glob("*"), *self.folder.glob(f"{_TEMPLATES}/*")]):
            if path.suffix in _ENDINGS and path.is_file():
                name = path.relative_to(self.folder)
                _add(found, str(name).encode(), path.read_bytes())
        for library in _LIBRARIES:
            _add(found, library.encode(), _version(library).encode())
        for module in _CODE:
            _add(found, Path(str(module.__file__)).read_bytes())
        return found.hexdigest()


class CachedData(NamedTuple):
    """A job's data, and where they are kept."""

    data: JobData
    keys: dict[str, str]
    """Keys of the cache's entries: `train`, and `eval` if the job has one."""


class TokenCache:
    """Tokenized files below a folder, which many processes and hosts may share.

    Args:
        folder: `ROOT/cache/tokens` of a service.
        read: opens files that jobs name; None = as this process may.
    """

    def __init__(self, folder: Path, read: Read | None = None) -> None:
        self.folder = folder
        self._read = read

    def load(
        self,
        job: JobSpec,
        source: TokenizerFolder,
        vocab_size: int,
        keys: Mapping[str, str] | None = None,
    ) -> CachedData:
        """A job's data: from the cache if they are there, else read, tokenized and kept.

        Args:
            keys: of the job's entries, where they are known: its files are not read, then.
        """
        train, evaluation = files_of(job)
        files = {"train": train} | ({} if evaluation is None else {"eval": evaluation})
        kept, found = {}, {}
        for name, file in files.items():
            key = (keys or {}).get(name)
            kept[name], found[name] = self._load(file, source, vocab_size, key)
            file.warn(kept[name].loaded)
        data = JobData.of_files(
            kept["train"].loaded,
            kept["eval"].loaded if "eval" in kept else None,
            kept["train"].fingerprint,
        )
        return CachedData(data, found)

    def prune(self) -> None:
        """Removes what nobody has used for long, and what writers that were killed have left."""
        for path in self.folder.glob("*/*"):
            is_entry = path.name == ENTRY_NAME
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > (_IDLE_S if is_entry else _LEFT_S):
                    path.unlink()
                    if is_entry:
                        path.parent.rmdir()

    def _load(
        self, file: JsonlFile, source: TokenizerFolder, vocab_size: int, known: str | None
    ) -> tuple[KeptFile, str]:
        if known is not None and (kept := self._get(known)) is not None:
            return kept, known
        found = file.read(self._read)
        key = _key(file, found, source, vocab_size)
        if known is not None and key != known:
            raise ValueError(
                f"{file.key} must be the file that was validated, with the same tokenizer, got "
                f"another: {file.where}; submit the job again"
            )
        kept = self._get(key)
        if kept is None:
            path = self.folder / key / ENTRY_NAME
            write_tokens(path, file.tokenize(found, source.tokenizer, vocab_size))
            kept = map_tokens(path)
        return kept, key

    def _get(self, key: str) -> KeptFile | None:
        path = self.folder / key / ENTRY_NAME
        try:
            kept = map_tokens(path)
        except FileNotFoundError:
            return None
        except DamagedTokens as error:
            logger.warning("tokens are made again: %s", error)
            return None
        with suppress(OSError):
            os.utime(path)  # for `prune`
        return kept


@lru_cache(maxsize=4)
def _load_tokenizer(folder: Path, digest: str) -> Any:
    """One with a large vocabulary takes a second, which the next job need not wait for."""
    return load_tokenizer(folder)


def _key(file: JsonlFile, found: Contents, source: TokenizerFolder, vocab_size: int) -> str:
    what: dict[str, Any] = {
        "files": [hashlib.sha256(content).hexdigest() for content in found.files],
        "template": found.template,
        "learn": file.job.data.learn,
        "tokenizer": source.digest,
        "vocab_size": vocab_size,
        "max_seq_len": file.job.max_seq_len,
        "overlong": file.job.data.overlong,
    }
    if file.job.preference is not None:
        what["pairs"] = True
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _add(digest: Any, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
