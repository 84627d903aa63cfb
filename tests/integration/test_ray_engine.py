"""The engine `ray` on a cluster of this machine, with ranks that train nothing.

TLORA_ALL_TESTS=1 also kills Ray's own processes, and trains.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
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
from tests.helpers.ray_cluster import RayCluster, ray_cluster, start_ray
from tests.helpers.real_gang import digests, drive
from tests.helpers.session import ALL_TESTS
from tlora_megatron.service.engines.base import GangEngine
from tlora_megatron.service.engines.protocol import say_died
from tlora_megatron.service.engines.ray.engine import ADDRESS, AUTH, RayEngine, cluster_address
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import GangFolder

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
