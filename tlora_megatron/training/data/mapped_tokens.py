"""Token sequences in a safetensors file: written at once, mapped by whoever reads them.

One file holds all sequences end to end: `tokens` int32, `is_target` bool, `ends` int64, and beside
them what was counted while they were made. Many processes that map it share its memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from tlora_megatron.files import replacing
from tlora_megatron.training.data.jsonl_file import LoadedFile
from tlora_megatron.training.data.tokenize import TokenSequence, fingerprint

_DTYPES = {"tokens": ("I32", np.int32), "is_target": ("BOOL", np.bool_), "ends": ("I64", np.int64)}
_HEADER_BYTES = 8
_LARGEST_HEADER = 1 << 16


class DamagedTokens(ValueError):
    """A file that does not hold what was written."""


class KeptFile(NamedTuple):
    """The content of a file of tokens."""

    loaded: LoadedFile
    fingerprint: str
    """Digest of its sequences, in order."""


class MappedSequences(Sequence[TokenSequence]):
    """Sequences cut out of two long arrays when they are asked for.

    Args:
        tokens: `[n]` int32, all sequences end to end.
        is_target: `[n]` bool.
        ends: `[sequences]` int64, where each sequence ends.
    """

    def __init__(self, tokens: np.ndarray, is_target: np.ndarray, ends: np.ndarray) -> None:
        self._tokens, self._is_target = tokens, is_target
        self._begins = np.concatenate([np.zeros(1, np.int64), ends])

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, index: int) -> TokenSequence: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenSequence, ...]: ...
    def __getitem__(self, index: int | slice) -> TokenSequence | tuple[TokenSequence, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must be in [0, {len(self)}), got {index}")
        own = index % len(self)
        begin, end = int(self._begins[own]), int(self._begins[own + 1])
        return TokenSequence(self._tokens[begin:end], self._is_target[begin:end])

    @property
    def lengths(self) -> np.ndarray:
        """`[sequences]` tokens of each, without cutting any out."""
        return np.diff(self._begins)


def lengths_of(sequences: Sequence[TokenSequence]) -> np.ndarray:
    """`[sequences]` tokens of each sequence."""
    if isinstance(sequences, MappedSequences):
        return sequences.lengths
    return np.array([len(sequence.tokens) for sequence in sequences], dtype=np.int64)


def rows_of(sequences: Sequence[TokenSequence], num_sides: int) -> np.ndarray:
    """`[examples]` rows that each example takes in a micro-batch, both sides of a pair."""
    return (lengths_of(sequences) - 1).reshape(-1, num_sides).sum(axis=1)


def write_tokens(path: Path, loaded: LoadedFile) -> None:
    """Writes a file of tokens; a kill or a full disk leaves none, and writers do not mix."""
    parts = _parts(loaded.sequences)
    digest = hashlib.sha256()
    for part in parts.values():
        digest.update(part.data)
    header = _header(parts, loaded, digest.hexdigest())
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(header)
        for part in parts.values():
            file.write(part.data)


def map_tokens(path: Path) -> KeptFile:
    """Maps a file of tokens after checking every byte of it.

    Raises:
        DamagedTokens: if it is not whole.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _HEADER_BYTES:
            raise DamagedTokens(f"{path} must hold a header, got {size} bytes")
        content = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    try:
        arrays, counted = _read(content)
        sequences = MappedSequences(*(arrays[name] for name in _DTYPES))
        loaded = LoadedFile(
            sequences=sequences,
            num_truncated=int(counted["num_truncated"]),
            num_dropped=int(counted["num_dropped"]),
            num_endless=int(counted["num_endless"]),
        )
        return KeptFile(loaded, str(counted["fingerprint"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedTokens(f"{path} must hold tokens as written, got: {error}") from error


def _parts(sequences: Sequence[TokenSequence]) -> dict[str, np.ndarray]:
    lengths = lengths_of(sequences)
    return {
        "ends": np.cumsum(lengths, dtype=np.int64),  # first, where 8 bytes are aligned
        "tokens": np.concatenate([s.tokens for s in sequences]).astype(np.int32, copy=False),
        "is_target": np.concatenate([s.is_target for s in sequences]),
    }


def _header(parts: dict[str, np.ndarray], loaded: LoadedFile, digest: str) -> bytes:
    header: dict[str, Any] = {
        "__metadata__": {
            "sha256": digest,
            "fingerprint": fingerprint(loaded.sequences),
            "num_truncated": str(loaded.num_truncated),
            "num_dropped": str(loaded.num_dropped),
            "num_endless": str(loaded.num_endless),
        }
    }
    offset = 0
    for name, part in parts.items():
        end = offset + part.nbytes
        kind = _DTYPES[name][0]
        header[name] = {"dtype": kind, "shape": list(part.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_HEADER_BYTES, "little") + text


def _read(content: memoryview) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    header_size = int.from_bytes(content[:_HEADER_BYTES], "little")
    if header_size > min(_LARGEST_HEADER, len(content) - _HEADER_BYTES):
        raise ValueError(f"a header of {header_size} bytes")
    begin = _HEADER_BYTES + header_size
    header = json.loads(bytes(content[_HEADER_BYTES:begin]))
    data, counted = content[begin:], header["__metadata__"]
    if hashlib.sha256(data).hexdigest() != counted["sha256"]:
        raise ValueError("other values")
    arrays: dict[str, np.ndarray] = {}
    for name, (kind, dtype) in _DTYPES.items():
        first, last = header[name]["data_offsets"]
        if header[name]["dtype"] != kind:
            raise ValueError(f"{name} of type {header[name]['dtype']}")
        arrays[name] = np.frombuffer(data[first:last], dtype=dtype)
    ends, tokens = arrays["ends"], arrays["tokens"]
    whole = bool(len(ends)) and ends[-1] == len(tokens) == len(arrays["is_target"])
    if not whole or (np.diff(ends, prepend=0) < 1).any():
        raise ValueError("ends that do not fit the tokens")
    return arrays, counted
