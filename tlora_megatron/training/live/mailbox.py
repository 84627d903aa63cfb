"""Requests to a run that trains: files in a folder that only its user can open.

`OUT/.live` is there while a run listens. Each request is a file, put there by a rename; so is each
answer. Nothing listens on a port, and the processes of both may be on different hosts.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tlora_megatron.files import BY_UMASK, write_atomic
from tlora_megatron.training.run.output_dir import is_held

logger = logging.getLogger(__name__)

FOLDER = ".live"
TOKENS = f"{FOLDER}/tokens"
"""Below the output folder: a cache of the tokens of jobs that are added."""
_REQUESTS, _ANSWERS = "requests", "answers"
_LOOK_S = 0.05
ALIVE_S = 1.0
_LARGEST_BYTES = 1 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Request(NamedTuple):
    """A request to a run that trains."""

    number: str
    body: Mapping[str, Any]


class RunMailbox:
    """The run's side, on the process that writes its files.

    Args:
        output_dir: of the run, which holds it.

    Raises:
        OSError: if the folder cannot be made.
    """

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / FOLDER
        self._open: set[str] = set()
        """Requests without an answer."""
        _remove(self.folder)
        self.folder.mkdir(mode=0o700)
        for name in (_REQUESTS, _ANSWERS):
            (self.folder / name).mkdir(mode=0o700)

    @property
    def has_mail(self) -> bool:
        """True if a request waits; looks at the folder alone."""
        try:
            with os.scandir(self.folder / _REQUESTS) as entries:
                return any(not entry.name.startswith(".") for entry in entries)
        except OSError:  # taken away under the run, which trains on
            return False

    def take(self) -> list[Request]:
        """The requests that have come, each once; what is none is answered as an error."""
        found = []
        for path in sorted((self.folder / _REQUESTS).glob("[!.]*")):
            self._open.add(path.name)
            try:
                found.append(Request(path.name, _read(path)))
            except (OSError, ValueError) as error:
                self.answer(path.name, {"error": f"a request must be a JSON object: {error}"})
            path.unlink(missing_ok=True)
        return found

    def answer(self, number: str, body: Mapping[str, Any]) -> None:
        """Answers a request, once."""
        if number in self._open:
            self._open.remove(number)
            with suppress(OSError):
                write_atomic(self.folder / _ANSWERS / number, json.dumps(body), mode=BY_UMASK)

    def close(self) -> None:
        """Removes the folder: nobody listens any more. A second call does nothing."""
        with suppress(OSError):
            _remove(self.folder)


class LiveRun:
    """The side of somebody who asks something of a run.

    Args:
        output_dir: of the run.

    Raises:
        ValueError: if no run trains there, or it is somebody else's.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self._folder = output_dir / FOLDER
        if not self._folder.is_dir() or not is_held(output_dir):
            raise ValueError(
                f"a run must be training in {output_dir}, got none; without --add and --cancel "
                f"`tlora train` starts one"
            )
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise ValueError(f"the run in {output_dir} must be your own, got somebody else's")

    @property
    def tokens(self) -> Path:
        """The folder where the run's processes look for tokens."""
        return self.output_dir / TOKENS

    def ask(
        self, body: Mapping[str, Any], wait: Callable[[float], None] = time.sleep
    ) -> Mapping[str, Any]:
        """Hands a request over and waits for its answer.

        Raises:
            RuntimeError: if the run ends before.
        """
        number = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        ended = RuntimeError(f"the run in {self.output_dir} has ended before it answered")
        try:
            write_atomic(self._folder / _REQUESTS / number, json.dumps(body), mode=BY_UMASK)
        except OSError as error:
            raise ended from error
        looked_s = time.monotonic()
        while True:
            with suppress(FileNotFoundError):
                return _read(self._folder / _ANSWERS / number)
            if time.monotonic() - looked_s > ALIVE_S:
                looked_s = time.monotonic()
                if not self._folder.is_dir() or not is_held(self.output_dir):
                    raise ended
            wait(_LOOK_S)


def _read(path: Path) -> Mapping[str, Any]:
    with os.fdopen(os.open(path, _READ), "rb") as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
            raise ValueError(f"larger than {_LARGEST_BYTES} bytes")
        body = json.loads(file.read())
    if not isinstance(body, dict):
        raise ValueError(f"got {type(body).__name__}")
    return body


def _remove(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
