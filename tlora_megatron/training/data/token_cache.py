"""A cache of tokenized files, addressed by all that shapes the tokens.

A file is tokenized once, when its job is validated. After that every process of every gang maps
what was kept: the same bits, without a tokenizer. A damaged entry is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from tlora_megatron.config.job import JobSpec
from tlora_megatron.training.data import chats, jsonl_file, rows, tokenize
from tlora_megatron.training.data.job_data import JobData, load_tokenizer
from tlora_megatron.training.data.jsonl_file import JsonlFile, files_of
from tlora_megatron.training.data.mapped_tokens import (
    DamagedTokens,
    KeptFile,
    map_tokens,
    write_tokens,
)

logger = logging.getLogger(__name__)

ENTRY_NAME = "tokens.safetensors"
_LIBRARIES = ("transformers", "tokenizers", "jinja2")
_CODE = (tokenize, chats, rows, jsonl_file)
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
        """The Hugging Face tokenizer; the last few of a process stay loaded.

        Raises:
            ValueError: if the folder holds none.
        """
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
        read: gives the content of a file that a job names; None = opens its path.
    """

    def __init__(self, folder: Path, read: Callable[[JsonlFile], bytes] | None = None) -> None:
        self.folder = folder
        self._read = read or JsonlFile.read

    def load(
        self,
        job: JobSpec,
        source: TokenizerFolder,
        vocab_size: int,
        keys: Mapping[str, str] | None = None,
    ) -> CachedData:
        """A job's data: from the cache if they are there, else read, tokenized and kept.

        Args:
            source: the base's tokenizer.
            vocab_size: rows of the base's embedding.
            keys: of the job's entries, where they are known: its files are not read, then.

        Raises:
            ValueError: as `load_job_data` does, or if a file is not the one that the key is of.
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

    def prune(self, idle_s: float = _IDLE_S) -> None:
        """Removes what nobody has used for long, and what writers that were killed have left.

        A job that still asks for such an entry makes it again.
        """
        for path in self.folder.glob("*/*"):
            is_entry = path.name == ENTRY_NAME
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > (idle_s if is_entry else _LEFT_S):
                    path.unlink()
                    if is_entry:
                        path.parent.rmdir()

    def _load(
        self, file: JsonlFile, source: TokenizerFolder, vocab_size: int, known: str | None
    ) -> tuple[KeptFile, str]:
        kept = self._get(known) if known is not None else None
        if kept is not None and known is not None:
            return kept, known
        content = self._read(file)
        key = _key(file, content, source, vocab_size)
        if known is not None and key != known:
            raise ValueError(
                f"{file.key} must be the file that was validated, with the same tokenizer, got "
                f"another: {file.where}; submit the job again"
            )
        kept = self._get(key)
        if kept is None:
            path = self.folder / key / ENTRY_NAME
            write_tokens(path, file.tokenize(content, source.tokenizer, vocab_size))
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


def _key(file: JsonlFile, content: bytes, source: TokenizerFolder, vocab_size: int) -> str:
    what = {
        "file": hashlib.sha256(content).hexdigest(),
        "tokenizer": source.digest,
        "vocab_size": vocab_size,
        "max_seq_len": file.job.max_seq_len,
        "overlong": file.job.data.overlong,
    }
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
