"""Wires between processes: a log that grows, a folder of requests, a pipe of lines.

| wire | who writes | who reads | is left when both have died | carries |
|---|---|---|---|---|
| `append_log.AppendLog` | one process | any number | yes | a gang's commands, its events |
| `RequestFolder` | any number ask | one answers | yes | what is asked of driven jobs and runs |
| `LinePipe` | a process and its child | both | no | orders to processes of the service |

A message is one JSON object on one line, and `RequestFolder` takes any bytes. Nothing here needs
more than the standard library.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tlora_megatron.files import flush, write_atomic

_READ_BYTES = 1 << 16
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system without hard links answers."""


def to_line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Base of values that travel: one JSON object on one line."""

    def to_json(self) -> str:
        """The message as one line, without the line's end."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Reads what `to_json` wrote; raises `ValueError` if it is something else."""
        try:
            return cls(**json.loads(line))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"a message must be a {cls.__name__} in JSON, got {line[:200]!r}: {error}"
            ) from error


class RequestFolder:
    """Requests as files of one folder, and answers of the same names as files of another one.

    Each is written whole or not at all, and outlives a fall of the machine if `durable`. Neither
    side holds any state: whatever dies, the other one goes on from the files.
    """

    def __init__(
        self,
        requests: Path,
        answers: Path,
        *,
        suffix: str = "",
        durable: bool = True,
        mode: int = 0o600,
    ) -> None:
        self.requests, self.answers = requests, answers
        self._suffix = suffix
        self._durable, self._mode = durable, mode

    def request(self, name: str) -> Path:
        """The file of a request."""
        return self.requests / f"{name}{self._suffix}"

    def result(self, name: str) -> Path:
        """The file of the answer to a request."""
        return self.answers / f"{name}{self._suffix}"

    def ask(self, name: str, content: bytes) -> bool:
        """Leaves a request; False if there is one of this name, which counts."""
        path = self.request(name)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(aside, content, durable=self._durable, mode=self._mode)
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
        except OSError as error:
            # Without hard links two that ask under one name at once may both be told True.
            if error.errno not in _NO_LINKS:
                raise
            if path.exists():
                return False
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        if self._durable:
            flush(path.parent)
        return True

    def answer(self, name: str, content: bytes) -> None:
        """Answers a request; a second answer takes the first one's place."""
        path = self.result(name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, content, durable=self._durable, mode=self._mode)

    def asked(self) -> list[str]:
        """Names of the requests that are there, in order."""
        return self._names(self.requests)

    def answered(self) -> list[str]:
        """Names of the answers that are there, in order."""
        return self._names(self.answers)

    def drop_request(self, name: str) -> None:
        """Removes a request, if it is there."""
        self.request(name).unlink(missing_ok=True)

    def drop_answer(self, name: str) -> None:
        """Removes an answer, if it is there."""
        self.result(name).unlink(missing_ok=True)

    def held_bytes(self) -> int:
        """Bytes of all that is in the two folders."""
        total = 0
        for folder in (self.requests, self.answers):
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # one that is removed meanwhile
                        total += entry.stat().st_size
        return total

    def _names(self, folder: Path) -> list[str]:
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
        return sorted(
            name.removesuffix(self._suffix)
            for name in names
            if name.endswith(self._suffix) and not name.startswith(".")
        )


class LinePipe:
    """Lines of JSON both ways between a process and its child; nothing waits but `wait`.

    It owns both descriptors; without one to read from it is only written to.
    """

    def __init__(self, reading: int | None, writing: int) -> None:
        self._reading: int | None = reading
        self._writing: int | None = writing
        for descriptor in (reading, writing):
            if descriptor is not None:
                os.set_blocking(descriptor, False)
        self._rest = b""
        self._unsent = b""
        self.is_over = False
        """True once all was read that the other end has sent before it was closed."""

    @classmethod
    def of_child(cls) -> Self:
        """The child's end. What libraries print goes where errors go from now on."""
        writing = os.dup(1)
        os.dup2(2, 1)
        return cls(0, writing)

    def fileno(self) -> int:
        """The descriptor that can be read when something has come."""
        return -1 if self._reading is None else self._reading

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends a message; False if nobody is there to read it any more."""
        self._unsent += to_line(message)
        return self._send_rest()

    def receive(self) -> list[dict[str, Any]]:
        self._send_rest()
        while self._reading is not None:
            try:
                data = os.read(self._reading, _READ_BYTES)
            except BlockingIOError:
                break
            self._rest += data
            if not data:
                self.is_over = True
                break
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, seconds: float | None = None) -> None:
        """Waits so long at most until something has come, or the other end is closed."""
        end_s = None if seconds is None else time.monotonic() + seconds
        while True:
            poll = select.poll()
            if self._reading is not None:
                poll.register(self._reading, select.POLLIN)
            if self._unsent and self._writing is not None:
                poll.register(self._writing, select.POLLOUT)
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            ready = poll.poll(None if left_s is None else 1000 * left_s)
            self._send_rest()
            if not ready or any(descriptor == self._reading for descriptor, _ in ready):
                return

    def hang_up(self) -> None:
        """Closes the way out: the other end sees that nothing more comes."""
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None

    def close(self) -> None:
        """Closes both ways; a second call does nothing."""
        self.hang_up()
        if self._reading is not None:
            os.close(self._reading)
            self._reading = None
        self.is_over = True

    def _send_rest(self) -> bool:
        if self._writing is None:
            return False
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._writing, self._unsent) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:  # what it has sent before is still to be read
            self._unsent = b""
            return False
        return True
