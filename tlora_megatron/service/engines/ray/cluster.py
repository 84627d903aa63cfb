"""A Ray cluster of this host alone, for one service: with a token, and ended by process id."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tlora_megatron.files import read_json, write_atomic, write_json
from tlora_megatron.service.engines.rank_process import inherited_environment
from tlora_megatron.service.home import make_folder
from tlora_megatron.service.processes import Life, identity_of

AUTH = "RAY_AUTH_MODE"
TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
ADDRESS = "RAY_ADDRESS"
_LOOPBACK = "127.0.0.2"
"""Ray replaces 127.0.0.1 by the host's outer address, which a laptop changes."""
_OBJECT_STORE_BYTES = 100 << 20
"""Nothing goes through it; Ray takes 30 % of the memory otherwise."""
_START_S = 120.0
_LONGEST_TEMP = 35
"""Bytes; Ray's sockets lie 70 further down, and a socket's path has 107 at most."""


def check_installed() -> None:
    """Looks for Ray without importing it.

    Raises:
        ImportError: with the command that installs it.
    """
    if importlib.util.find_spec("ray") is None:
        raise ImportError("--engine ray must find Ray; pip install 'tlora-megatron[ray]'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A Ray cluster and how to reach it."""

    address: str
    environment: Mapping[str, str]
    """Variables that a program needs in its environment to connect."""
    leader: Life | None = None
    """The process whose end is the cluster's, where it is this service's own."""

    @property
    def is_over(self) -> bool:
        """True once a cluster of the service's own has ended; others are asked."""
        return self.leader is not None and self.leader.is_over


def given_cluster(address: str) -> Cluster:
    """A cluster that is there already.

    Raises:
        ValueError: if programs may talk to it without a token.
        RuntimeError: if nobody answers.
    """
    mode = os.environ.get(AUTH)
    if mode != "token":
        raise ValueError(
            f"{AUTH} must be token for --engine ray, got {mode}: whoever reaches a port of a Ray "
            f"cluster without it can run code there; start the cluster and the service with "
            f"{AUTH}=token and {TOKEN_FILE}"
        )
    if _is_open(address):
        raise ValueError(
            f"the Ray cluster at {address} must ask for a token, got one that lets everybody in "
            f"and run code; start all of its nodes with {AUTH}=token and {TOKEN_FILE}"
        )
    return Cluster(address=address, environment={})


@functools.cache
def _is_open(address: str) -> bool:
    """True if a program without a token gets in; it is ended as soon as it is refused."""
    knock = subprocess.Popen(
        [sys.executable, "-m", "tlora_megatron.service.engines.ray.knock", address],
        env={**inherited_environment(), AUTH: "disabled", "PYTHONPATH": package_path()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert knock.stderr is not None
    try:
        for line in knock.stderr:
            if "Unauthenticated" in line or "AuthenticationError" in line:
                return False
        if knock.wait() == 0:
            return True
    finally:
        knock.kill()
        knock.wait()
        knock.stderr.close()
    raise RuntimeError(f"Ray must be reachable at {address}, got no answer")


def own_cluster(folder: Path, *, cpus: int, gpus: int) -> Cluster:
    """The cluster that the service has started before, or a new one.

    It outlives this process as the gangs do. When one of Ray's processes ends, all end.

    Args:
        folder: gets the token, the log and what is known of the processes, and Ray's own files
            unless its path is too long for their sockets: then they lie in /tmp.

    Raises:
        RuntimeError: if it does not start.
    """
    make_folder(folder)
    known = read_json(folder / "cluster.json")
    environment = {AUTH: "token", TOKEN_FILE: str(folder / "token")}
    if known is not None:
        leader = Life.known_as(known["leader"])
        if not leader.is_over:
            return Cluster(address=known["address"], environment=environment, leader=leader)
    write_atomic(folder / "token", secrets.token_hex(32).encode())
    temp = _temp_folder(folder)
    process = start_ray(folder, temp, environment, cpus=cpus, gpus=gpus)
    life = Life.of(process.pid)
    assert life is not None, "a child that nobody has waited for has a life"
    address = _wait_for_address(process, folder, temp)
    write_json(folder / "cluster.json", {"leader": identity_of(process.pid), "address": address})
    return Cluster(address=address, environment=environment, leader=life)


def end_cluster(cluster: Cluster) -> None:
    """Ends a cluster of the service's own with all its processes, actors included."""
    if cluster.leader is not None and not cluster.leader.is_over:
        # It leads a session of which all of Ray's processes are members.
        os.killpg(cluster.leader.pid, signal.SIGKILL)


def package_path() -> str:
    """PYTHONPATH with which other processes import the same package."""
    mine = str(Path(__file__).resolve().parents[4])
    rest = os.environ.get("PYTHONPATH")
    return mine if not rest else os.pathsep.join([mine, rest])


def start_ray(
    folder: Path, temp: Path, environment: Mapping[str, str], *, cpus: int, gpus: int
) -> subprocess.Popen[bytes]:
    """Starts Ray's head on this host; the process leads a session of all of Ray's."""
    words = [
        *("-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"),
        *(f"--node-ip-address={_LOOPBACK}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"),
        *(f"--object-store-memory={_OBJECT_STORE_BYTES}", f"--temp-dir={temp}"),
        *("--include-dashboard=false", "--disable-usage-stats"),
        f"--ray-client-server-port={_free_port()}",
    ]
    (temp / "ray_current_cluster").unlink(missing_ok=True)
    log = os.open(folder / "ray.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, *words],
            env={**inherited_environment(), **environment, "PYTHONPATH": package_path()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            umask=0o077,
        )


def _wait_for_address(process: subprocess.Popen[bytes], folder: Path, temp: Path) -> str:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s and process.poll() is None:
        said = (folder / "ray.log").read_text(errors="replace")
        if "Ray runtime started" in said:
            return (temp / "ray_current_cluster").read_text().strip()
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    said = (folder / "ray.log").read_text(errors="replace").strip()
    last = said.splitlines()[-1] if said else "nothing"
    raise RuntimeError(f"Ray must start within {_START_S:g} s, got {last!r}; see {folder}/ray.log")


def _temp_folder(folder: Path) -> Path:
    """A folder of this user alone; Ray opens to all what it makes below."""
    if len(str(folder).encode()) > _LONGEST_TEMP:
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
        folder = make_folder(Path(tempfile.gettempdir()) / f"tlora-ray-{os.getuid()}-{name}")
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise RuntimeError(f"{folder} must be a folder of this user alone; remove it")
    return make_folder(folder / "temp")


def _free_port() -> int:
    """A port for Ray's client server, which cannot be left out; it takes the token, too."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
