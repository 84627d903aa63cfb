"""A Ray cluster of this machine for tests, started as docs/engines.md says, and ended whole."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launch import wait_until
from tlora_megatron.service.engines.protocol import inherited_environment
from tlora_megatron.service.supervisor import Child, package_path

_LOOPBACK = "127.0.0.2"
"""Ray replaces 127.0.0.1 by the host's outer address."""
TOKEN = {"RAY_AUTH_MODE": "token"}


@dataclass(frozen=True)
class RayCluster:
    address: str
    environment: Mapping[str, str]
    """Variables of a program that is to connect."""
    leader: Child
    folder: Path

    def process(self, name: str) -> int:
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
                if session == self.leader.pid and words[0].endswith(name.encode()):
                    return int(path.name)
        raise AssertionError(f"no {name}")

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.leader.pid, signal.SIGKILL)
        self.leader.kill()


def start_ray(
    folder: Path, *, cpus: int, auth: Mapping[str, str] = TOKEN, port: int = 0
) -> RayCluster:
    """Starts a head in a folder, whose path must be short: Ray's sockets lie far below it."""
    folder.mkdir(exist_ok=True)
    token, log = folder / "token", folder / "ray.log"
    if not token.exists():
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
    environment = {**auth, "RAY_AUTH_TOKEN_PATH": str(token)}
    words = [
        *("ray", "start", "--head", "--block", f"--port={port}", f"--num-cpus={cpus}"),
        *(f"--node-ip-address={_LOOPBACK}", "--num-gpus=0", "--object-store-memory=100000000"),
        *(f"--temp-dir={folder}/r", "--include-dashboard=false", "--disable-usage-stats"),
        f"--ray-client-server-port={_free_port()}",
    ]
    log.unlink(missing_ok=True)
    address = folder / "r" / "ray_current_cluster"
    address.unlink(missing_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    leader = Child(
        [shutil.which("ray", path=path) or "ray", *words[1:]],
        environment={**inherited_environment(), **environment, "PYTHONPATH": package_path()},
        log=log,
    )

    def has_started() -> bool:
        assert leader.exit_code is None, log.read_text(errors="replace")
        return address.is_file() and bool(address.read_text())  # written last, after all is said

    wait_until(has_started, "Ray's start")
    return RayCluster(address.read_text(), environment, leader, folder)


@contextmanager
def ray_cluster(*, cpus: int, auth: Mapping[str, str] = TOKEN) -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="tlora-"))
    cluster = start_ray(folder, cpus=cpus, auth=auth)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
