"""Append-only files of lines with one writer at a time and any number of readers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_BLOCK = 16384
"""Bytes that are read at once where a file is searched from its end or middle."""


class LineWriter:
    """Appends lines to a file that only its owner may read.

    A line whose writer was killed halfway is cut off when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        self._cut_torn_end(path)

    def _cut_torn_end(self, path: Path) -> None:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            whole = _break_before(file, size)
        if whole != size:
            os.ftruncate(self._file, whole)

    def append(self, line: str, *, durable: bool) -> None:
        """Appends one line; returns when it is on the disk where `durable`.

        Raises:
            OSError: if the disk refuses; then nothing was appended.
        """
        data = line.encode() + b"\n"
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, data)
            if written != len(data):
                raise OSError(f"a line of {len(data)} bytes must be written whole, got {written}")
            if durable:
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class LineReader:
    """Reads the whole lines that were added to a file since the last call.

    The file may be missing at first. It is opened anew each time, as network file systems want it.

    Args:
        offset: where a line begins; those before it are not read.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = self._seen = offset

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
        return whole.decode().split("\n")[:-1]


def last_line(path: Path) -> str | None:
    """The last whole line of a file; None if there is none."""
    try:
        with path.open("rb") as file:
            end = _break_before(file, file.seek(0, os.SEEK_END))
            if not end:
                return None
            begin = _break_before(file, end - 1)
            file.seek(begin)
            return file.read(end - 1 - begin).decode()
    except FileNotFoundError:
        return None


def offset_behind(path: Path, is_read: Callable[[str], bool]) -> int:
    """Where a reader goes on that has read the first lines of a file: of any length, in a moment.

    Args:
        is_read: true of the first lines, up to any one of them.

    Returns:
        The beginning of a line before which all are read; of unread ones it is the first but for
        a few thousand bytes.
    """
    try:
        with path.open("rb") as file:
            begin, end = 0, file.seek(0, os.SEEK_END)
            while end - begin > _BLOCK:
                middle = _break_before(file, (begin + end) // 2)
                file.seek(middle)
                line = file.readline()
                if middle > begin and is_read(line.decode()):
                    begin = middle
                elif middle > begin:
                    end = middle
                else:
                    break  # one line is longer than half of what is left
            return begin
    except FileNotFoundError:
        return 0


def _break_before(file: BinaryIO, end: int) -> int:
    """Where the line begins that `end` lies in or at whose beginning it is."""
    while end > 0:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
