"""Keeps the process of HTTP alive beside a controller, and ends it with it.

The controller's process holds the socket: while a process of HTTP starts anew, clients wait in its
queue, and no connection is refused.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Self

from tlora_megatron.config.reader import must
from tlora_megatron.files import write_atomic
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import LOCAL, SCOPES, Store
from tlora_megatron.service.supervisor import Child

TOKEN_NAME = "http_token"
"""In the service's folder: the token of whoever serves it."""
_FORMER_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_JOIN_S = 5.0
_PLACE = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+):)?(?P<port>\d{1,5})")


class Place(NamedTuple):
    """Where the service listens."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads `PORT` or `HOST:PORT`; raises `ConfigError` if it is neither."""
        match = _PLACE.fullmatch(text)
        if match is None or int(match["port"]) > 65535:
            raise must("--http", "be PORT or HOST:PORT, with a port of at most 65535", text)
        return cls((match["host"] or "127.0.0.1").strip("[]"), int(match["port"]))

    @property
    def url(self) -> str:
        """The address for a browser of this host."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{self.port}"

    def names(self, more: Sequence[str]) -> frozenset[str] | None:
        """Names by which it may be asked, `more` among them; None = any."""
        if not self.is_loopback and not more:
            return None
        host = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset({"localhost", "127.0.0.1", "[::1]", host, *map(str.lower, more)})

    @property
    def is_loopback(self) -> bool:
        """True if no other host reaches it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def own_token(home: Home, store: Store) -> str:
    """The token of whoever serves the folder, of all scopes, kept there; made if none works."""
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
    """A socket that listens, and that children inherit; a `ConfigError` for a bad address.

    Behind a controller that was killed its process of HTTP keeps the port for a few seconds.
    """
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    end_s = time.monotonic() + _FORMER_S
    while True:
        try:
            listener = socket.create_server((place.host, place.port), family=family, backlog=2048)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < end_s:
                time.sleep(0.1)
                continue
            remedy = f"{os.strerror(error.errno or 0)}; another port may be free"
            address = ":".join(map(str, place))
            raise must("--http", "be a free port of this host", address, remedy) from None
        # Connections inherit it; asyncio sets it only where a socket names its protocol. Without
        # it the second part of an answer waits 40 ms for the client's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener


class Front:
    """Keeps the process of HTTP running; a context manager that ends it and closes the listener.

    The pause before another one starts doubles while they do not live long. `words` are further
    arguments of the process; `say` tells a person what happens.
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
        self._command = [
            *(sys.executable, "-m", "tlora_megatron.service.api", str(home.root)),
            *("--fd", str(listener.fileno()), "--watch-stdin", *words),
        ]
        self._say = say
        self.child: Child | None = None
        """The process that runs now."""
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tlora-front", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with self._guard:
            child = self.child
        if child is not None:
            child.end()
        self._thread.join(_JOIN_S)
        self._listener.close()

    def _run(self) -> None:
        pause_s, descriptor = _FIRST_PAUSE_S, self._listener.fileno()
        while True:
            begin_s = time.monotonic()
            with self._guard:
                if self._stop.is_set():
                    return
                self.child = Child(self._command, wire="stdin", pass_fds=[descriptor])
            code = self.child.wait()
            if self._stop.is_set():
                return
            self.child.close()
            is_well = time.monotonic() - begin_s > _LONGEST_PAUSE_S
            pause_s = _FIRST_PAUSE_S if is_well else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._say(f"the process of HTTP ended with code {code}: it starts again")
            self._stop.wait(pause_s)
