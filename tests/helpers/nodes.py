"""Two nodes on one machine: torchrun agents in network namespaces of their own, joined by a cable.

Where the machine does not allow namespaces, both agents run on localhost.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.helpers.launch import HANG_S, REPO, environment
from tlora_megatron.runtime.ranks import free_port

_PORT = 29400
_INTERFACE = "cable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """How to start a process on each of two nodes, and how they reach each other."""

    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    addresses: tuple[str, str]
    interface: str
    reason: str | None
    """Why there are no namespaces; None where there are."""


@contextmanager
def two_nodes() -> Iterator[Network]:
    """Two namespaces with a cable between them, or localhost twice; taken down at the end."""
    names = tuple(f"tlora{os.getpid()}{node}" for node in "ab")
    addresses = ("10.213.7.1", "10.213.7.2")
    try:
        try:
            _make_namespaces(names, addresses)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or error
            yield Network(
                prefixes=((), ()),
                addresses=("127.0.0.1", "127.0.0.1"),
                interface="lo",
                reason=f"no network namespaces: {str(said).strip()}",
            )
            return
        first, second = (("ip", "netns", "exec", name) for name in names)
        yield Network(
            prefixes=(first, second), addresses=addresses, interface=_INTERFACE, reason=None
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _make_namespaces(names: Sequence[str], addresses: Sequence[str]) -> None:
    for name in names:
        _ip("netns", "add", name)
    ends = [part for name in names for part in ("name", _INTERFACE, "netns", name)]
    # `ip link add name X netns A type veth peer name X netns B`
    _ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
    for name, address in zip(names, addresses, strict=True):
        _ip("-n", name, "address", "add", f"{address}/24", "dev", _INTERFACE)
        for interface in ("lo", _INTERFACE):
            _ip("-n", name, "link", "set", interface, "up")


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=HANG_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    process: subprocess.Popen[bytes]
    log: Path
    begin_s: float = field(default_factory=time.monotonic)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        """The exit code.

        Raises:
            AssertionError: if it hangs; holds the end of the output.
        """
        try:
            return self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"took over {HANG_S} s\n{self.output()[-8000:]}") from None

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)


@contextmanager
def agents(
    network: Network, folder: Path, nproc: int, target: Sequence[object], *, max_restarts: int = 0
) -> Iterator[tuple[Agent, Agent]]:
    """torchrun on both nodes, `nproc` ranks each; what is left at the end is killed.

    Args:
        folder: gets the nodes' output.
        target: what torchrun runs: `-m MODULE ARGS`.
    """
    port = _PORT if network.reason is None else free_port()
    folder.mkdir(parents=True, exist_ok=True)
    settings = environment() | {"GLOO_SOCKET_IFNAME": network.interface}
    started = []
    for node, (prefix, address) in enumerate(zip(network.prefixes, network.addresses, strict=True)):
        command = [
            *(*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", nproc, "--max-restarts", max_restarts, "--rdzv-id", "test"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{network.addresses[0]}:{port}"),
            # Both nodes have this machine's name: torchrun could not tell which one is meant.
            *("--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", address),
            *target,
        ]
        log = folder / f"node{node}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [str(word) for word in command],
                env=settings,
                cwd=REPO,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        started.append(Agent(process=process, log=log))
    family = [psutil.Process(agent.process.pid) for agent in started]
    try:
        yield started[0], started[1]
    finally:
        for process in family:
            _kill_tree(process)
        for agent in started:
            agent.process.wait()


def _kill_tree(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        for member in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
