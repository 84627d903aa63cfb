"""The process of HTTP: serves one service's folder on one address until it is told to end."""

from __future__ import annotations

import gc
import resource
import sys

import uvicorn
from fastapi import FastAPI

from tlora_megatron.service.api.limits import MOST_HEADER_BYTES, LimitedProtocol

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

    Usual shells allow 1,024 connections. Threads hand the interpreter on after half a millisecond,
    not five, for a request is carried by several; and what stays for good is not looked through
    whenever memory is collected. Together these halve the slowest of a hundred submits.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
