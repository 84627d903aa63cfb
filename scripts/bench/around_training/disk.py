"""The floor of saving: what a disk takes for bytes alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

_BLOCK_BYTES = 64 << 20


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_s(num_bytes: int, file: Path) -> float:
    """Seconds for a file of so many bytes, written by one thread and flushed; it is removed."""
    block = os.urandom(_BLOCK_BYTES)
    begin_s = time.monotonic()
    with file.open("wb", buffering=0) as opened:
        for begin in range(0, num_bytes, _BLOCK_BYTES):
            opened.write(block[: num_bytes - begin])
        os.fsync(opened.fileno())
    taken_s = time.monotonic() - begin_s
    file.unlink()
    return taken_s
