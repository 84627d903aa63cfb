"""The application and its server: what it refuses before any route is reached, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

import tlora_megatron
from tlora_megatron.service.api import gate, probes
from tlora_megatron.service.api.figures import Latencies
from tlora_megatron.service.api.gate import (
    ApiError,
    Format,
    as_api_error,
    format_of,
    native_format,
    secret_of,
)
from tlora_megatron.service.api.native import archives, history, jobs, sweeps
from tlora_megatron.service.api.openai import routes as openai
from tlora_megatron.service.api.page import router as page
from tlora_megatron.service.api.sampling import routes as sampling
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import router as tinker
from tlora_megatron.service.store import StoreError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Know = Callable[[str | None], Awaitable[object]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MOST_BYTES = 8 << 20
MOST_BYTES_OF: Mapping[str, int] = {
    "/v1/files": (1 << 30) + (1 << 20),
    "/v1/uploads": 65 << 20,
    "/api/v1/forward_backward": 65 << 20,
}
"""Beginning of a path -> bytes of a body."""
MOST_HEADER_BYTES = 32 << 10
MOST_HEADERS = 100
HEADERS_S = 20.0
"""A client must have sent its headers so long after it connected or began them."""
PAUSE_S = 30.0
"""A body must not pause for longer."""
_SLOWEST_BYTES_PER_S = 4096
_PATIENCE_S = 60.0
"""Slower bodies are given up after so long."""


class Limits:
    """Ends requests whose bodies are too large or come too slowly, in the path's error format.

    `know` refuses a token that is none: frameworks read bodies before they ask who sends them.
    `hosts` are the names by which the service may be asked; None = any.
    """

    def __init__(
        self,
        app: App,
        formats: Mapping[str, Format],
        know: Know,
        hosts: Collection[str] | None = None,
    ) -> None:
        self._app = app
        self._formats = formats
        self._know = know
        self._hosts = hosts

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        body = _Body(receive, most_bytes(scope["path"]), partial(self._know, secret_of(headers)))
        has_begun = False

        async def send_unless_refused(message: Message) -> None:
            # What a route makes of a broken body is not sent.
            nonlocal has_begun
            if body.error is None or has_begun:
                has_begun = True
                await send(message)

        try:
            hosts = None if scope["path"] in probes.PATHS else self._hosts
            check_host(headers, hosts, is_change=scope["method"] not in _READS)
            body.check_length(headers.get(b"content-length"))
            await self._app(scope, body.receive, send_unless_refused)
        except ApiError as error:
            body.error = error
        except asyncio.CancelledError:  # the service ends, and has waited long enough for this
            if has_begun:
                raise
            sentence = "the service stops now; ask again when it runs"
            body.error = ApiError(503, sentence, headers={"Retry-After": "5"})
        if body.error is not None and not has_begun:
            await _refuse(send, body.error, format_of(self._formats, scope["path"]))


_READS = ("GET", "HEAD", "OPTIONS")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(:\d+)?")


def check_host(
    headers: Mapping[bytes, bytes], hosts: Collection[str] | None, *, is_change: bool
) -> None:
    """Refuses what a foreign site's page has its reader's browser send.

    Such a page may give its own name this host's address ("DNS rebinding"): it then asks for a name
    that is none of ours. Where it asks for ours, its browser says where the page comes from.
    """
    asked = headers.get(b"host", b"").decode("latin-1").lower()
    match = _HOST.fullmatch(asked)
    name = match[1] if match else asked
    if hosts is not None and name not in hosts:
        raise ApiError(
            403,
            f"Host must be one of {', '.join(sorted(hosts))}, got {name[:100]!r}: the service "
            "allows another name with tlora serve --allow-host NAME",
        )
    origin = headers.get(b"origin", b"").decode("latin-1").lower()
    if is_change and origin and origin.rpartition("://")[2] != asked:
        raise ApiError(403, f"Origin must be that of this service, got {origin[:100]!r}")


class _Body:
    """A request's body while it comes."""

    def __init__(self, receive: Receive, most: int, know: Callable[[], Awaitable[object]]) -> None:
        self._receive = receive
        self._most = most
        self._know = know
        self._is_known = False
        self._num_bytes = 0
        self._begin_s = time.monotonic()
        self._is_whole = False
        self.error: ApiError | None = None
        """Why the request is given up."""

    def check_length(self, header: bytes | None) -> None:
        """Refuses a body that says itself that it is too large."""
        if header is not None and header.isdigit() and int(header) > self._most:
            raise _too_large(self._most, f"{int(header):,}")

    async def receive(self) -> Message:
        """The next part; what a route waits for after the whole body may come at any time."""
        if self._is_whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), PAUSE_S)
        except TimeoutError:
            self.error = _too_slow()
            raise self.error from None
        self._num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._num_bytes > self._most:
            self.error = _too_large(self._most, "more")
        elif (
            time.monotonic() - self._begin_s > _PATIENCE_S + self._num_bytes / _SLOWEST_BYTES_PER_S
        ):
            self.error = _too_slow()
        elif self._num_bytes and not self._is_known:
            await self._check_sender()
        if self.error is not None:
            raise self.error
        return message

    async def _check_sender(self) -> None:
        """Gives a stranger's body up before more of it is kept.

        What the store refuses is told here, too: a framework calls it a body that it cannot read.
        """
        try:
            await self._know()
        except (ApiError, StoreError) as error:
            self.error = as_api_error(error)
        self._is_known = True


def most_bytes(path: str) -> int:
    """Bytes that a body may have below a path."""
    return next(
        (most for start, most in MOST_BYTES_OF.items() if path.startswith(start)), MOST_BYTES
    )


def _too_large(most: int, got: str) -> ApiError:
    return ApiError(413, f"the body must have at most {most:,} bytes, got {got}", code="too_large")


def _too_slow() -> ApiError:
    return ApiError(408, "the body must come faster: the service waits no longer", code="too_slow")


async def _refuse(send: Send, error: ApiError, form: Format) -> None:
    content = json.dumps(form(error)).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(content)).encode()))
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


_HEAD_END = re.compile(rb"\n\r?\n")


class _StrictBuffer(ReceiveBuffer):
    """Takes headers as RFC 9112 wants them sent: what programs may read differently is refused."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines of a request's head once it is whole, without line ends."""
        end = _HEAD_END.search(self._data)
        if end is not None:
            head = bytes(self._data[: end.end()])
            lines = head.split(b"\r\n")
            names = [line.partition(b":")[0].strip().lower() for line in lines]
            if (
                len(head) > MOST_HEADER_BYTES
                or len(lines) > MOST_HEADERS + 3  # the request's line, and two empty ones
                or names.count(b"authorization") > 1
                or any(b"\n" in line or line[:1] in (b" ", b"\t") for line in lines)
            ):
                raise h11.RemoteProtocolError("the head of a request must be plain")
        return super().maybe_extract_lines()


class LimitedProtocol(H11Protocol):
    """Speaks HTTP with clients that send their headers in time, and not too many of them."""

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn._receive_buffer = _StrictBuffer()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, or has too many headers, in the format of all errors."""
        sentence = (
            f"a request must be HTTP/1.1 with at most {MOST_HEADER_BYTES:,} bytes of headers, "
            f"{MOST_HEADERS} at most, CR LF behind each, none folded and one Authorization, got "
            "something else"
        )
        if self.cycle is None or self.cycle.response_complete:
            content = json.dumps(native_format(ApiError(400, sentence)))
            head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close"
            answer = f"{head}\r\nContent-Length: {len(content)}\r\n\r\n{content}"
            self.transport.write(answer.encode())
        self.transport.close()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADERS_S, self._give_up)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


_FORMATS: Mapping[str, gate.Format] = {tinker.PREFIX: tinker.tinker_format}
"""Beginning of a path -> the format of its errors, where it is not ours and OpenAI's."""


def make_app(service: Service, hosts: Collection[str] | None = None) -> FastAPI:
    """The app of a service; it ends what its routers started, but closes neither store nor home.

    Args:
        hosts: names by which it may be asked, in lower case; None = any.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.open()
        yield
        await service.close()

    app = FastAPI(
        title="tLoRA service",
        version=tlora_megatron.__version__,
        openapi_tags=page.TAGS,
        docs_url=None,  # FastAPI's page loads its scripts from somewhere else
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    gate.install(app, _FORMATS)
    app.add_middleware(Limits, formats=_FORMATS, know=service.gate.know, hosts=hosts)
    app.add_middleware(Latencies)
    for room in (jobs, sweeps, history, archives):
        app.include_router(room.router(service))
    app.include_router(page.docs_router())
    app.include_router(page.router(service))
    app.include_router(probes.router(service))
    app.include_router(sampling.router(service))
    app.include_router(tinker.router(service))
    app.include_router(openai.router(service))
    return app


KEEP_ALIVE_S = 75
_SWITCH_S = 0.0005
"""After so long a thread that computes lets others have the interpreter."""
_COLLECT_AT = (50_000, 20, 50)
"""Objects made, and collections of the young, after which memory is collected."""


def make_server(app: FastAPI) -> uvicorn.Server:
    """A server of an app; `serve(sockets=[...])` runs it."""
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        ws="none",
        loop="asyncio",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
        log_level="error",
        access_log=False,
        server_header=False,
    )
    return uvicorn.Server(config)


def prepare_process() -> None:
    """Makes this process one that serves: many connections, and no request that waits for long.

    Threads hand the interpreter on after half a millisecond, not five, and what stays for good is
    not looked through whenever memory is collected: the slowest of a hundred submits takes half as
    long.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
