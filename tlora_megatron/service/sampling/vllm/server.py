"""A `vllm serve` of our own: one base, on the loopback interface, with a key that only we know."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tlora_megatron.service.home import make_folder
from tlora_megatron.service.sampling.sampler import SamplerUnavailable, SamplingRefused
from tlora_megatron.service.supervisor import Child

COMMAND = ("vllm", "serve")
_LOOK_S = 0.2
"""Between two questions if it is up; loading an 8B model takes minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSettings:
    """How servers are started."""

    gpu: str | None = None
    """as in CUDA_VISIBLE_DEVICES; None = all"""
    most_rank: int = 64
    """of an adapter; vLLM keeps room for so much"""
    adapters: int = 8
    """held at a time"""
    command: tuple[str, ...] = COMMAND


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs."""

    address: str
    key: str | None
    child: Child | None = None
    """None: somebody else's."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers that it wants to see in every request."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    @property
    def is_over(self) -> bool:
        """True if it was ours and has ended."""
        return self.child is not None and self.child.exit_code is not None


async def start_server(
    folder: Path, name: str, base: Mapping[str, Any], settings: VllmSettings
) -> Server:
    """Starts a server and waits until it answers.

    Args:
        folder: gets its log.
        name: under which it offers the base.

    Raises:
        SamplingRefused: if vLLM cannot have this base.
        SamplerUnavailable: if it cannot be started.
    """
    if base.get("path") is None or base.get("quantization") is not None:
        raise SamplingRefused(
            f"base {name} must be a folder of weights as they are for vLLM; the sampler `own` "
            f"takes random and quantised ones"
        )
    port, key = _free_port(), secrets.token_urlsafe(32)
    log = make_folder(folder) / f"vllm-{port}.log"
    words = (
        *(base["path"], "--served-model-name", name, "--dtype", base["dtype"]),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--enable-lora", "--max-lora-rank", str(settings.most_rank)),
        *("--max-loras", str(settings.adapters), "--max-logprobs", "20"),
    )
    added = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_API_KEY": key}
    if settings.gpu is not None:
        added["CUDA_VISIBLE_DEVICES"] = settings.gpu
    try:
        command = (*settings.command, *words)
        child = Child(command, environment=os.environ | added, log=log)
    except FileNotFoundError:
        raise SamplerUnavailable(
            "vLLM is not installed: pip install vllm, in an environment of its own if torch's "
            "version differs, and put its `vllm` into PATH"
        ) from None
    server = Server(f"http://127.0.0.1:{port}", key, child)
    try:
        await _wait_until_up(server, child)
    except BaseException:
        await end_server(server)
        raise
    return server


async def end_server(server: Server) -> None:
    """Ends a server of ours."""
    if server.child is not None:
        server.child.handle.send(signal.SIGTERM)
        await server.child.ended()
        server.child.close()


async def _wait_until_up(server: Server, child: Child) -> None:
    async with httpx.AsyncClient(headers=server.headers) as client:
        while not server.is_over:
            with suppress(httpx.TransportError):
                if (await client.get(f"{server.address}/health")).is_success:
                    return
            await asyncio.sleep(_LOOK_S)
    raise SamplerUnavailable(f"vllm serve cannot be started: {child.last_words}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
