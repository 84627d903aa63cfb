"""Keeps the process of HTTP alive beside a controller, and ends it with it.

The controller's process holds the socket: while a process of HTTP starts anew, clients wait in its
queue, and no connection is refused.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

from tlora_megatron.config.reader import must
from tlora_megatron.files import write_atomic
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import LOCAL, SCOPES, Store

TOKEN_NAME = "http_token"
"""In the service's folder: the token of whoever serves it."""
_PLACE = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+):)?(?P<port>\d{1,5})")
_END_S = 5.0
_LONGEST_PAUSE_S = 30.0


class Place(NamedTuple):
    """Where the service listens."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads `PORT` or `HOST:PORT`.

        Raises:
            ConfigError: if it is neither.
        """
        match = _PLACE.fullmatch(text)
        if match is None or int(match["port"]) > 65535:
            raise must("--http", "be PORT or HOST:PORT, with a port of at most 65535", text)
        return cls((match["host"] or "127.0.0.1").strip("[]"), int(match["port"]))

    @property
    def url(self) -> str:
        """The address for a browser of this host."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if no other host reaches it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def own_token(home: Home, store: Store) -> str:
    """The token of whoever serves the folder, of all scopes; made where there is none that works.

    It is kept in the folder, which nobody else can read.
    """
    path = home.root / TOKEN_NAME
    with suppress(OSError):
        secret = path.read_text().strip()
        found = store.tokens.find(secret)
        if found is not None and "admin" in found.scopes:
            return secret
    secret = store.tokens.make(LOCAL, SCOPES).secret
    write_atomic(path, f"{secret}\n".encode())
    return secret


def listen(place: Place) -> socket.socket:
    """A socket that listens; children inherit it.

    Raises:
        ConfigError: if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        listener = socket.create_server((place.host, place.port), family=family, backlog=2048)
        # Connections inherit it; asyncio sets it only where a socket names its protocol. Without
        # it the second part of an answer waits 40 ms for the client's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        remedy = f"{os.strerror(error.errno or 0)}; another port may be free"
        raise must(
            "--http", "be a free port of this host", ":".join(map(str, place)), remedy
        ) from None


class Front:
    """Runs the process of HTTP, and runs it again when it dies; a context manager.

    Args:
        home: of the service.
        listener: from `listen`; closed at the end.
        words: arguments for the process besides.
        say: tells a person what happens.
    """

    def __init__(
        self,
        home: Home,
        listener: socket.socket,
        *,
        words: Sequence[str] = (),
        say: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._say = say
        self._command = [
            *(sys.executable, "-m", "tlora_megatron.service.api", str(home.root)),
            *("--fd", str(listener.fileno()), "--watch-stdin", *words),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id of the process that serves now."""
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        with self._guard:
            process = self._process
        if process is not None:
            _end(process)
        self._thread.join(_END_S)
        self._listener.close()

    def _run(self) -> None:
        pause_s = 0.5
        while not self._stop.is_set():
            begin_s = time.monotonic()
            with self._guard:
                if self._stop.is_set():
                    return
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[self._listener.fileno()],
                    start_new_session=True,  # Ctrl-C is for the controller, which ends this one
                )
            code = self._process.wait()
            if self._stop.is_set():
                return
            lived_s = time.monotonic() - begin_s
            pause_s = 0.5 if lived_s > _LONGEST_PAUSE_S else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._say(f"the process of HTTP ended with code {code}: it starts again")
            self._stop.wait(pause_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process: by word, then by signal, then by force."""
    assert process.stdin is not None, "the process must have been started with a pipe"
    with suppress(OSError):
        process.stdin.close()
    for end in (None, process.terminate, process.kill):
        if end is not None:
            end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return
