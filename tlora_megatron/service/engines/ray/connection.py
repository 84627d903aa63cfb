"""The service's end of the bridge to Ray: a child process, and lines of JSON both ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlora_megatron.service.engines.rank_process import inherited_environment
from tlora_megatron.service.engines.ray.cluster import Cluster, package_path

_COMMAND = (sys.executable, "-m", "tlora_megatron.service.engines.ray.bridge")
_CONNECT_S = 60.0
_SILENCE_S = 30.0
"""Longest silence of the bridge: it speaks every second, unless a call of Ray does not return."""


class Connection:
    """One bridge, from its start to its end."""

    def __init__(self, cluster: Cluster, namespace: str, log: Path) -> None:
        environment = {**inherited_environment(), **cluster.environment}
        environment |= {"PYTHONPATH": package_path(), "RAY_DEDUP_LOGS": "0"}
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(output, "wb") as errors:
            self._process = subprocess.Popen(
                [*_COMMAND, cluster.address, namespace],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._rest = b""
        self._spoke_s = time.monotonic()
        self._is_open = True
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
        return not self._is_open or is_silent or self._process.poll() is not None

    @property
    def pid(self) -> int:
        """The bridge's process."""
        return self._process.pid

    def send(self, do: str, **more: Any) -> None:
        """Tells the bridge one thing; one that has ended hears nothing."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            self._is_open = False

    def receive(self) -> list[Mapping[str, Any]]:
        """Takes the bridge's messages that have come in; never waits."""
        assert self._process.stdout is not None
        if not self._is_open:
            return []
        data = self._process.stdout.read() or b""
        if not data:
            return []
        self._spoke_s = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        words: list[Mapping[str, Any]] = [json.loads(line) for line in lines]
        for word in words:
            if word["say"] == "lost":
                self.why = word["reason"]
        return words

    def close(self) -> None:
        """Ends the bridge; gangs go on."""
        self._is_open = False
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue
