"""An append-only file of numbered messages: one process writes it, any number read it.

Nothing here needs more than the standard library.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from tlora_megatron.channel import Message

_BLOCK = 16384
"""Bytes that are read at once where a file is searched from its end or middle."""
_LOOK_S = 0.005
"""Between two looks at a log that is waited for: one `stat` each."""
_ASK_S = 0.1
"""Between two looks that open the file: a network file system answers `stat` from what it
remembers, for seconds, and asks its server only when a file is opened."""

M = TypeVar("M", bound=Message)


class LineReader:
    """Reads the whole lines that were added to a file since the last call, from an offset on.

    The file may be missing at first. It is opened anew each time, as network file systems want it.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = self._seen = offset
        self._asked_s = 0.0

    @property
    def has_more(self) -> bool:
        """True if the file has changed since the last `read`."""
        try:
            return self._size() != self._seen
        except FileNotFoundError:
            return False

    def _size(self) -> int:
        if time.monotonic() < self._asked_s + _ASK_S:
            return os.stat(self._path).st_size
        self._asked_s = time.monotonic()
        with self._path.open("rb") as file:
            return os.fstat(file.fileno()).st_size

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


class AppendLog(Generic[M]):
    """An append-only file of numbered messages, which only its owner may read.

    One process at a time may append. The file is closed behind every message, so that a network
    file system shows it to other hosts at once. `number` is the field that numbers them, from 1.
    """

    def __init__(self, path: Path, kind: type[M], number: str) -> None:
        self.path = path
        self._kind = kind
        self._field = number
        self._lines = LineReader(path)
        self._read = 0
        """Number of the last message that `_lines` has read."""
        self._written: int | None = None
        """Number of the last message in the file, once this process has appended one."""

    def append(self, message: M, *, durable: bool) -> None:
        """Appends a message, unless it or a later one is there; `durable`: it is on the disk."""
        if self._written is None:
            _cut_torn_end(self.path)
            last = self.last()
            self._written = self._number(last) if last is not None else 0
        if self._number(message) > self._written:
            _append(self.path, message.to_json().encode() + b"\n", durable=durable)
            self._written = self._number(message)

    def after(self, number: int) -> list[M]:
        """Messages with a greater number, in order and each once; quick where one reads on."""

        def is_read(line: str) -> bool:
            message = self._message(line)
            return message is not None and self._number(message) <= number

        if number != self._read:
            offset = _offset_behind(self.path, is_read) if number else 0
            self._lines = LineReader(self.path, offset)
        self._read = number
        found = []
        for line in self._lines.read():
            message = self._message(line)
            if message is not None and self._number(message) > self._read:
                self._read = self._number(message)
                found.append(message)
        return found

    def last(self) -> M | None:
        """The last message of all."""
        line = _last_line(self.path)
        if line is None:
            return None
        if (message := self._message(line)) is not None:
            return message
        messages = self.after(0)
        return messages[-1] if messages else None

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; returns True as soon as there may be something to read."""
        end_s = time.monotonic() + seconds
        while not self._lines.has_more:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(_LOOK_S, left_s))
        return True

    def _number(self, message: M) -> int:
        return int(getattr(message, self._field))

    def _message(self, line: str) -> M | None:
        """The message of a line; None for one that a fall of the machine has left damaged."""
        try:
            return self._kind.from_json(line)
        except ValueError:
            return None


def _append(path: Path, data: bytes, *, durable: bool) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        before = os.fstat(file).st_size
        try:
            written = os.write(file, data)
            if written != len(data):
                raise OSError(f"a line of {len(data)} bytes must be written whole, got {written}")
            if durable:
                os.fsync(file)
        except OSError:
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


def _cut_torn_end(path: Path) -> None:
    """Cuts off a line whose writer was killed halfway."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _break_before(file, size)
        if whole != size:
            file.truncate(whole)


def _last_line(path: Path) -> str | None:
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


def _offset_behind(path: Path, is_read: Callable[[str], bool]) -> int:
    """Where a reader goes on that has read the first lines of a file: of any length, in a moment.

    `is_read` is true of the first lines. All before the line of the result are read; of unread ones
    it is the first but for a few thousand bytes.
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
