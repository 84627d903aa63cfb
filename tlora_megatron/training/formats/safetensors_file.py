"""Writes safetensors files tensor by tensor, so that no file is ever held in memory as a whole.

Several threads put tensors together and write them, each at its place in the file.

The bytes are those of `safetensors.torch.save`. That one joins them in memory first, and holds
Python's lock meanwhile: on a thread it would stop the training for seconds. Here only the kernel's
writes and numpy's copies take time, and both let other threads run.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.layers.slab import check_finite
from tlora_megatron.parallel.groups import host_threads

_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_NOT_THERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_AHEAD_BYTES = 32 << 20
"""A thread writes as much, then asks the disk to begin with it: else that would be idle until the
file is flushed."""
_THREADS = 4
"""One puts tensors together and copies them to the page cache at 1 GB/s, which is less than disks
take."""
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE

_libc = ctypes.CDLL(None, use_errno=True)


class Scratch:
    """fp32 memory in which one tensor after another is put together."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def room(self, shape: tuple[int, ...]) -> Tensor:
        """Returns room for a tensor; it is the same for every tensor."""
        numel = math.prod(shape)
        if self._flat.numel() < numel:
            self._flat = torch.empty(numel)
        return self._flat[:numel].view(shape)


class PendingTensor(NamedTuple):
    """A tensor of a file, whose values are put together when its turn comes."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[Scratch], Tensor]
    """Returns the values, contiguous and on the CPU; they may lie in the scratch."""
    read_one: Callable[[int, Scratch], Tensor] | None = None
    """Returns the values at one index of the first of three dimensions, without the others."""


class _File(NamedTuple):
    header: bytes
    tensors: list[PendingTensor]
    """In the order of the file."""
    size_bytes: int


def write_tensors(
    path: Path,
    tensors: Sequence[PendingTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Writes a new file and returns its size; the disk's space is reserved before the first byte.

    Raises:
        ValueError: if a value is not finite.
    """
    file = _plan(tensors, metadata, dtype)
    with path.open("wb", buffering=0) as opened:
        _reserve(opened.fileno(), file.size_bytes)
        _write(opened.fileno(), np.frombuffer(file.header, np.uint8), 0)
        write = partial(_write_part, opened.fileno(), dtype)
        with ThreadPoolExecutor(host_threads(_THREADS)) as pool:
            for _ in pool.map(write, _parts(file, dtype)):  # raises what was raised there
                pass
    return file.size_bytes


_Part = tuple[int, list[PendingTensor]]
"""Where tensors begin that one thread writes, one behind the other."""


def _parts(file: _File, dtype: torch.dtype) -> Iterator[_Part]:
    """Cuts a file into parts of about the size with which the disk is asked to begin."""
    begin = end = len(file.header)
    tensors: list[PendingTensor] = []
    for tensor in file.tensors:
        tensors.append(tensor)
        end += math.prod(tensor.shape) * dtype.itemsize
        if end - begin >= _AHEAD_BYTES:
            yield begin, tensors
            begin, tensors = end, []
    yield begin, tensors


def _write_part(descriptor: int, dtype: torch.dtype, part: _Part) -> None:
    scratch, (begin, tensors) = Scratch(), part
    offset = begin
    for tensor in tensors:
        values = tensor.read(scratch).to(dtype)
        check_finite({tensor.name: values})
        offset = _write(descriptor, _raw(values), offset)
    _begin_writing(descriptor, begin, offset)


def holds_tensors(
    path: Path,
    tensors: Sequence[PendingTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Returns True if a file is what `write_tensors` would write, byte by byte."""
    file, scratch = _plan(tensors, metadata, dtype), Scratch()
    try:
        with path.open("rb", buffering=0) as opened:
            if os.fstat(opened.fileno()).st_size != file.size_bytes:
                return False
            if os.pread(opened.fileno(), len(file.header), 0) != file.header:
                return False
            offset = len(file.header)
            for tensor in file.tensors:
                raw = _raw(tensor.read(scratch).to(dtype))
                stored = np.frombuffer(os.pread(opened.fileno(), raw.size, offset), np.uint8)
                if not np.array_equal(stored, raw):
                    return False
                offset += raw.size
    except OSError:
        return False
    return True


def _plan(
    tensors: Sequence[PendingTensor], metadata: Mapping[str, str] | None, dtype: torch.dtype
) -> _File:
    """Lays the file out: tensors by name, the header filled up to 8 bytes."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for tensor in ordered:
        end = begin + math.prod(tensor.shape) * dtype.itemsize
        entries[tensor.name] = {
            "dtype": _TYPES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    return _File(header, ordered, len(header) + begin)


def _raw(values: Tensor) -> np.ndarray:
    raw: np.ndarray = values.detach().reshape(-1).view(torch.uint8).numpy()
    return raw


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Reserves a file's space; a disk that is too full refuses here.

    Not `os.posix_fallocate`: where the file system cannot, that writes every block.
    """
    if not hasattr(_libc, "fallocate") or ctypes.sizeof(ctypes.c_long) < 8:
        return
    if _libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)):
        number = ctypes.get_errno()
        if number not in _NOT_THERE:
            raise OSError(number, os.strerror(number))


def _begin_writing(descriptor: int, begin: int, end: int) -> None:
    """Has the disk begin with a part of a file, without waiting; a system that cannot need not."""
    if hasattr(_libc, "sync_file_range") and ctypes.sizeof(ctypes.c_long) == 8:
        place = ctypes.c_int64(begin), ctypes.c_int64(end - begin)
        _libc.sync_file_range(descriptor, *place, _BEGIN_WRITING)


def _write(descriptor: int, raw: np.ndarray, offset: int) -> int:
    """Writes all bytes at an offset; returns the offset behind them."""
    left = memoryview(raw.data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        offset += written
        left = left[written:]
    return offset
