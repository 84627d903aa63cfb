"""The wire to our sampling process: lines of JSON over its user's own Unix socket.

A connection carries one request, `{"op": ..., ...}`, and is closed to take it back. `generate`,
with `prompts` and `seed`, is answered by `{"piece": ...}` for each piece, or with `whole` for each
sequence, and `{"done": true}`;
`encode`, with `text` or `messages` and `tools`, by `{"tokens": [...]}`; `decode`, with `tokens` and
`each`, by `text` or `texts`. `{"error": SENTENCE}` may take an answer's place.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from tlora_megatron.runtime.sampling.values import (
    Piece,
    Prompt,
    SamplingParams,
    Scores,
    TokenLogprob,
    TopLogprobs,
)

LINE_BYTES = 64 << 20
"""The longest line that is read."""

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_MOST_BYTES = 100
"""Bytes of a socket's address, at most; the kernel takes 107."""
_BACKLOG = 4096
"""Calls that wait to be taken while a process is busy; the kernel may hold fewer (`somaxconn`)."""
_BUSY_S = 60.0
"""For a process that takes no call."""
LOOK_S = 0.01
"""Between two looks whether a process takes calls, which takes seconds at its start."""
T = TypeVar("T")


def prompt_to_json(prompt: Prompt) -> dict[str, Any]:
    """A prompt without the fields that have their defaults."""
    return lean(prompt) | ({"params": lean(prompt.params)})


def prompt_from_json(value: Any) -> Prompt:
    """Reads a prompt; raises `ValueError` for what is none."""
    found = dict(_fields(Prompt, value, "prompt"))
    params = dict(_fields(SamplingParams, found.pop("params", {}), "params"))
    for name in ("stop", "stop_tokens"):
        if name in params:
            params[name] = tuple(params[name])
    found["tokens"] = tuple(map(int, found.get("tokens", ())))
    found["targets"] = tuple(map(tuple, found.get("targets", ())))
    return Prompt(params=SamplingParams(**params), **found)


def piece_from_json(value: Mapping[str, Any]) -> Piece:
    """Reads what `lean` has made of a piece."""
    found = dict(value)
    for name in ("tokens", "logprobs"):
        found[name] = tuple(found.get(name, ()))
    found["top_logprobs"] = tuple(map(_top, found.get("top_logprobs", ())))
    if scores := found.get("scores"):
        top = tuple(None if one is None else _top(one) for one in scores.get("top", ()))
        targets = tuple(map(tuple, scores.get("targets", ())))
        found["scores"] = Scores(logprobs=tuple(scores["logprobs"]), top=top, targets=targets)
    return Piece(**found)


def _top(pairs: Any) -> TopLogprobs:
    return tuple(TokenLogprob(int(token), float(logprob)) for token, logprob in pairs)


def lean(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(value)}
    return {
        name: one
        for name, one in asdict(value).items()
        if defaults[name] is MISSING or getattr(value, name) != defaults[name]
    }


def _fields(kind: type[Any], value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object, got {type(value).__name__}")
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(value) - known):
        raise ValueError(f"{what} must have only {', '.join(sorted(known))}, got {unknown[0]}")
    return value


async def serve(path: Path, handler: Handler) -> asyncio.Server:
    """Listens at a path, in the place of whoever did before; of mode 0600 from the start."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with suppress(FileNotFoundError):
        path.unlink()
    with _short(path) as address:
        listener.bind(address)  # nobody can connect before it listens
        os.chmod(path, 0o600)
    return await asyncio.start_unix_server(
        handler, sock=listener, limit=LINE_BYTES, backlog=_BACKLOG
    )


async def connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to a path, and waits while whoever listens there is too busy to take more calls.

    asyncio takes a Unix socket whose queue of calls is full for one that connects by and by.

    Raises:
        BlockingIOError: if no call is taken for long.
        OSError: if nobody listens there.
    """
    end_s = time.monotonic() + _BUSY_S
    calling = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        calling.setblocking(False)
        while True:
            try:
                with _short(path) as address:
                    calling.connect(address)
                return await asyncio.open_unix_connection(sock=calling, limit=LINE_BYTES)
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise
            await asyncio.sleep(LOOK_S)
    except BaseException:
        calling.close()
        raise


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
