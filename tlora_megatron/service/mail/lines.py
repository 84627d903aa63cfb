"""Append-only files of lines with one writer at a time and any number of readers."""

from __future__ import annotations

import os
from pathlib import Path


class LineWriter:
    """Appends lines to a file that only its owner may read.

    A line whose writer was killed halfway is cut off when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        self._cut_torn_end(path)

    def _cut_torn_end(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.ftruncate(self._file, whole)

    def append(self, line: str, *, durable: bool) -> None:
        """Appends one line; returns when it is on the disk where `durable`.

        Raises:
            OSError: if the disk refuses; then nothing was appended.
        """
        data = line.encode() + b"\n"
        before = os.fstat(self._file).st_size
        written = os.write(self._file, data)
        if written != len(data):
            os.ftruncate(self._file, before)
            raise OSError(f"a line of {len(data)} bytes must be written whole, got {written}")
        if durable:
            os.fsync(self._file)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class LineReader:
    """Reads the whole lines that were added to a file since the last call.

    The file may be missing at first. It is opened anew each time, as network file systems want it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._seen = 0

    @property
    def has_more(self) -> bool:
        """True if the file has changed since the last `read`."""
        return self._size() != self._seen

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except FileNotFoundError:
            return 0

    def read(self) -> list[str]:
        """Returns new whole lines; the beginning of one that is being written waits."""
        if not self.has_more:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        self._seen = self._offset + len(content)
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode().splitlines()
