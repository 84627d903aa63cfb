"""The engine `ray` on a cluster of this machine, with ranks that train nothing.

TLORA_ALL_TESTS=1 also kills Ray's own processes, and trains.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.helpers.engine_case import (
    FAKE,
    EngineCase,
    OpenEngine,
    command,
    is_gone,
    poll_until,
    spec,
    wait_for_pids,
)
from tests.helpers.launch import wait_until
from tests.helpers.real_gang import digests, drive
from tests.helpers.session import ALL_TESTS
from tlora_megatron.service.engines.base import GangEngine
from tlora_megatron.service.engines.protocol import inherited_environment, say_died
from tlora_megatron.service.engines.ray.engine import ADDRESS, AUTH, RayEngine, cluster_address
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import GangFolder
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


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray (pip install 'tlora-megatron[ray]')"
)
ALL = pytest.mark.skipif(not ALL_TESTS, reason="takes long; TLORA_ALL_TESTS=1 runs it")

ALWAYS = ("test_commands_are_carried_out_once", "test_new_engine_takes_up_what_lives")
"""Tests of the class that always run; each start of a gang costs Ray two processes and seconds."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(cpus=3) as cluster:
        yield cluster


@pytest.fixture
def open_engine(
    cluster: RayCluster, root: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[OpenEngine]:
    if not ALL_TESTS and request.node.name not in ALWAYS:
        pytest.skip("takes long; TLORA_ALL_TESTS=1 runs it")
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    engines: list[RayEngine] = []

    def open_engine() -> RayEngine:
        engines.append(RayEngine(root, address=cluster.address, rank_command=FAKE))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


class TestRay(EngineCase):
    def test_bridge_that_is_killed_is_replaced(self, open_engine: OpenEngine, root: Path) -> None:
        engine = open_engine()
        assert isinstance(engine, RayEngine)
        engine.start(spec(root))
        poll_until(engine, "started")
        ranks = wait_for_pids(root)
        os.kill(engine._connection._child.pid, signal.SIGKILL)
        engine.post(command(1))
        assert poll_until(engine, "applied")[-1].body == {"seq": 1}
        assert not any(is_gone(pid) for pid in ranks)
        assert engine.kill("g", 1)

    def test_new_engine_takes_up_what_lives(
        self, engine: GangEngine, open_engine: OpenEngine, root: Path
    ) -> None:
        """Actors of no gang that it knows are swept meanwhile, and leave their places."""
        lost = GangFolder(root, "lost", 1)
        engine.start(replace(spec(root, places=((0, 2),)), gang="lost"))
        wait_until(lambda: bool(engine.poll({})) and lost.pid(0).exists(), "a rank")
        say_died(lost, {"rank": 0, "reason": "so a new engine thinks"})
        rank = int(lost.pid(0).read_text().split()[0])
        super().test_new_engine_takes_up_what_lives(engine, open_engine, root)
        wait_until(lambda: is_gone(rank), "its end")
        engine.start(spec(root, epoch=2, places=tuple((0, slot) for slot in range(3))))
        poll_until(engine, "started", epoch=2)

    @ALL
    @pytest.mark.slow
    def test_real_gang_keeps_its_bits(
        self, open_engine: OpenEngine, cluster: RayCluster, root: Path, tmp_path: Path
    ) -> None:
        open_engine().close()  # type: ignore[attr-defined]
        engine = RayEngine(root, address=cluster.address)
        killed = digests(engine, root, ((0, 0), (0, 1)), kill=True)
        engine.close()
        assert killed == drive("plain", tmp_path / "local")["digests"]


def test_cluster_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    with pytest.raises(ValueError, match="RAY_ADDRESS must name a cluster for --engine ray"):
        RayEngine(tmp_path)


def test_cluster_must_ask_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AUTH, raising=False)
    with pytest.raises(ValueError, match="RAY_AUTH_MODE must be token for --engine ray, got None"):
        cluster_address("127.0.0.1:1")


@ALL
@pytest.mark.slow
def test_cluster_that_lets_everybody_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTH, "token")
    with (
        ray_cluster(cpus=1, auth={AUTH: "disabled"}) as cluster,
        pytest.raises(ValueError, match="must ask for a token, got one that lets everybody"),
    ):
        cluster_address(cluster.address)


@ALL
@pytest.mark.slow
def test_cluster_whose_head_is_gone_and_that_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would end this process after a minute; the engine gives the gang up before."""
    root = Home.open(tmp_path / "s").root
    with ray_cluster(cpus=4) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        engine = RayEngine(root, address=cluster.address, rank_command=FAKE)
        engine.start(spec(root))
        poll_until(engine, "started")
        ranks = wait_for_pids(root)
        os.kill(cluster.leader.pid, signal.SIGSTOP)  # it would end the others with the head
        os.kill(cluster.process("gcs_server"), signal.SIGKILL)
        engine.post(command(1))
        poll_until(engine, "applied")  # gangs are reached without it
        assert poll_until(engine, "died")[-1].body["reason"].startswith("Ray is lost:")
        assert all(is_gone(pid) for pid in ranks)
        with pytest.raises(RuntimeError, match="Ray must be reachable to start gang g"):
            engine.start(spec(root, epoch=2))
        cluster.end()
        port = int(cluster.address.rpartition(":")[2])
        again = start_ray(cluster.folder, cpus=4, port=port)
        try:
            wait_until(lambda: engine.nodes()[0].healthy, "a healthy node")
            engine.start(spec(root, epoch=2))
            poll_until(engine, "started", epoch=2)
            assert engine.kill("g", 2)
        finally:
            engine.close()
            again.end()
