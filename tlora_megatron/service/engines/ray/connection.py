"""The way to a Ray cluster: who may take it, and the child process through which it goes."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora_megatron.service.engines.protocol import inherited_environment
from tlora_megatron.service.supervisor import Child, package_path

AUTH = "RAY_AUTH_MODE"
ADDRESS = "RAY_ADDRESS"
_TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
_MODULE = "tlora_megatron.service.engines.ray"
_CONNECT_S = 60.0
_SILENCE_S = 30.0
"""Longest silence of the bridge: it speaks every second, unless a call of Ray does not return."""
_LOOK_S = 0.05


def cluster_address(address: str | None) -> str:
    """The address of a cluster that asks for a token; None = that of RAY_ADDRESS.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if there is no address, or programs may talk to the cluster without a token.
        RuntimeError: if nobody answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise ImportError("--engine ray must find Ray; pip install 'tlora-megatron[ray]'")
    address = address or os.environ.get(ADDRESS)
    if not address:
        raise ValueError(
            f"{ADDRESS} must name a cluster for --engine ray, got none; `ray start --head` starts "
            f"one, as docs/engines.md says, and --engine local needs none on one host"
        )
    mode = os.environ.get(AUTH)
    if mode != "token":
        raise ValueError(
            f"{AUTH} must be token for --engine ray, got {mode}: whoever reaches a port of a Ray "
            f"cluster without it can run code there; start the cluster and the service with "
            f"{AUTH}=token and {_TOKEN_FILE}"
        )
    if _is_open(address):
        raise ValueError(
            f"the Ray cluster at {address} must ask for a token, got one that lets everybody in "
            f"and run code; start all of its nodes with {AUTH}=token and {_TOKEN_FILE}"
        )
    return address


@functools.cache
def _is_open(address: str) -> bool:
    """True if a program without a token gets in; it is ended as soon as it is refused."""
    environment = {**inherited_environment(), AUTH: "disabled", "PYTHONPATH": package_path()}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "probe.log"
        command = [sys.executable, "-m", f"{_MODULE}.probe_auth", address]
        probe = Child(command, environment=environment, log=log)
        try:
            while True:
                code = probe.exit_code  # before its words, so that none is missed
                said = log.read_text(errors="replace")
                if "Unauthenticated" in said or "AuthenticationError" in said:
                    return False
                if code is not None:
                    break
                time.sleep(_LOOK_S)
        finally:
            probe.kill()
    if code == 0:
        return True
    raise RuntimeError(f"Ray must be reachable at {address}, got no answer")


class Connection:
    """One bridge, from its start to its end."""

    def __init__(self, address: str, namespace: str, log: Path) -> None:
        environment = inherited_environment()
        environment |= {"PYTHONPATH": package_path(), "RAY_DEDUP_LOGS": "0"}
        command = [sys.executable, "-m", f"{_MODULE}.bridge", address, namespace]
        self._child = Child(command, environment=environment, log=log, wire="lines")
        self._spoke_s = time.monotonic()
        self.is_ready = False
        """True once it is connected with Ray."""
        self.why: str | None = None
        """The reason that it has given for its end."""

    @property
    def is_over(self) -> bool:
        """True once it has ended, or says nothing any more."""
        silence_s = time.monotonic() - self._spoke_s
        is_silent = silence_s > (_SILENCE_S if self.is_ready else _CONNECT_S)
        if is_silent:
            self.why = self.why or f"Ray has not answered for {silence_s:.0f} s"
        return is_silent or self._child.pipe.is_over or self._child.exit_code is not None

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, do: str, **more: Any) -> None:
        """Tells the bridge one thing; one that has ended hears nothing."""
        self._child.pipe.send({"do": do, **more})

    def receive(self) -> Sequence[Mapping[str, Any]]:
        """Takes the bridge's messages that have come in; never waits."""
        messages = self._child.pipe.receive()
        for message in messages:
            self._spoke_s = time.monotonic()
            if message["say"] == "lost":
                self.why = message["reason"]
        return messages

    def close(self) -> None:
        self._child.kill()
