"""Unix sockets of the user alone, in folders of any depth."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tlora_megatron.service.sampling.wire import LINE_BYTES

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_MOST_BYTES = 100
"""Bytes of an address, at most; the kernel takes 107."""


async def serve(path: Path, handler: Handler) -> asyncio.Server:
    """Listens at a path, in the place of whoever did before; of mode 0600 from the start."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with suppress(FileNotFoundError):
        path.unlink()
    with _short(path) as address:
        listener.bind(address)  # nobody can connect before it listens
        os.chmod(path, 0o600)
    return await asyncio.start_unix_server(handler, sock=listener, limit=LINE_BYTES)


async def connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to a path.

    Raises:
        OSError: if nobody listens there.
    """
    with _short(path) as address:
        return await asyncio.open_unix_connection(address, limit=LINE_BYTES)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yields a short name of a path."""
    if len(os.fsencode(path)) <= _MOST_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
