"""The engine `ray` on a cluster of this machine, with ranks that train nothing.

TLORA_ALL_TESTS=1 also kills Ray's own processes, and trains.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
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
    wait_until,
)
from tests.helpers.launch import HANG_S
from tests.helpers.real_gang import digests, drive
from tlora_megatron.service.engines.endings import say_died
from tlora_megatron.service.engines.protocol import GangEngine
from tlora_megatron.service.engines.ray import cluster as cluster_module
from tlora_megatron.service.engines.ray.cluster import (
    AUTH,
    TOKEN_FILE,
    Cluster,
    end_cluster,
    given_cluster,
    own_cluster,
)
from tlora_megatron.service.engines.ray.engine import RayEngine
from tlora_megatron.service.home import Home
from tlora_megatron.service.mail.folder import GangFolder

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray (pip install 'tlora-megatron[ray]')"
)
RUNS_ALL = bool(os.environ.get("TLORA_ALL_TESTS"))
ALL = pytest.mark.skipif(not RUNS_ALL, reason="takes long; TLORA_ALL_TESTS=1 runs it")


ALWAYS = (
    "test_commands_are_carried_out_once",
    "test_new_engine_takes_up_what_lives",
)
"""Tests of the class that always run; each start of a gang costs Ray two processes and seconds."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="tlora-"))
    cluster = own_cluster(folder, cpus=3, gpus=0)
    yield cluster
    end_cluster(cluster)
    assert cluster.leader is not None
    wait_until(lambda: cluster.is_over)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def open_engine(
    cluster: Cluster,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[OpenEngine]:
    if not RUNS_ALL and request.node.name not in ALWAYS:
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
        os.kill(engine.bridge_pid, signal.SIGKILL)
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
        wait_until(lambda: bool(engine.poll({})) and lost.pid(0).exists())
        say_died(lost, {"rank": 0, "reason": "so a new engine thinks"})
        rank = int(lost.pid(0).read_text().split()[0])
        super().test_new_engine_takes_up_what_lives(engine, open_engine, root)
        wait_until(lambda: is_gone(rank))
        engine.start(spec(root, epoch=2, places=tuple((0, seat) for seat in range(3))))
        poll_until(engine, "started", epoch=2)

    @ALL
    @pytest.mark.slow
    def test_real_gang_keeps_its_bits(
        self, open_engine: OpenEngine, cluster: Cluster, root: Path, tmp_path: Path
    ) -> None:
        open_engine().close()  # type: ignore[attr-defined]
        engine = RayEngine(root, address=cluster.address)
        killed = digests(engine, root, ((0, 0), (0, 1)), kill=True)
        engine.close()
        assert killed == drive("plain", tmp_path / "local")["digests"]


def test_cluster_must_ask_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AUTH, raising=False)
    with pytest.raises(ValueError, match="RAY_AUTH_MODE must be token for --engine ray, got None"):
        given_cluster("127.0.0.1:1")


@ALL
@pytest.mark.slow
def test_cluster_that_lets_everybody_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tlora-"))
    start = cluster_module.start_ray
    monkeypatch.setattr(
        cluster_module,
        "start_ray",
        lambda folder, temp, env, **more: start(folder, temp, {AUTH: "disabled"}, **more),
    )
    cluster = own_cluster(folder, cpus=1, gpus=0)
    monkeypatch.setenv(AUTH, "token")
    try:
        with pytest.raises(ValueError, match="must ask for a token, got one that lets everybody"):
            given_cluster(cluster.address)
    finally:
        end_cluster(cluster)
        wait_until(lambda: cluster.is_over)
        shutil.rmtree(folder, ignore_errors=True)


def test_token_and_files_are_the_users_alone(cluster: Cluster) -> None:
    token = Path(cluster.environment[TOKEN_FILE])
    assert token.stat().st_mode & 0o077 == 0
    assert token.parent.stat().st_mode & 0o077 == 0
    assert len(token.read_text()) == 64


@pytest.fixture
def own_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayEngine]:
    """An engine with a cluster of its own."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = RayEngine(Home.open(tmp_path / "s").root, 0, seats=4, rank_command=FAKE)
    yield engine
    for info in engine.gangs():
        engine.kill(info.gang, info.epoch)
    engine.close()


def process_of_ray(cluster: Cluster, name: str) -> int:
    """The process of a cluster of one's own that runs a program of this name."""
    assert cluster.leader is not None
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
        except OSError:
            continue
        if session == cluster.leader.pid and words[0].endswith(name.encode()):
            return int(path.name)
    raise AssertionError(f"no {name}")


@ALL
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_gangs_die_with_ray_and_it_is_started_again(
    own_engine: RayEngine, tmp_path: Path, name: str
) -> None:
    root = Home.open(tmp_path / "s").root
    own_engine.start(spec(root))
    poll_until(own_engine, "started")
    ranks = wait_for_pids(root)
    os.kill(process_of_ray(own_engine.cluster, name), signal.SIGKILL)
    died = poll_until(own_engine, "died")[-1]
    assert died.body["reason"].startswith("Ray is lost:") or "ended" in died.body["reason"]
    assert all(is_gone(pid) for pid in ranks)
    wait_until(lambda: bool(own_engine.nodes()) and own_engine.nodes()[0].healthy)

    def is_started() -> bool:
        own_engine.poll({})
        try:
            own_engine.start(spec(root, epoch=2))
        except RuntimeError:
            return False
        return True

    wait_until(is_started)
    poll_until(own_engine, "started", epoch=2)


@ALL
@pytest.mark.slow
def test_head_of_a_given_cluster_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would end this process after a minute; the engine gives the gang up before."""
    temp = Path(tempfile.mkdtemp(prefix="tlora-"))
    (temp / "token").write_text("5" * 64)
    monkeypatch.setenv(AUTH, "token")
    monkeypatch.setenv(TOKEN_FILE, str(temp / "token"))
    words = ["start", "--head", "--port=0", "--node-ip-address=127.0.0.2", "--num-cpus=4"]
    words += [f"--temp-dir={temp}/r", "--object-store-memory=100000000", "--disable-usage-stats"]
    words += ["--include-dashboard=false", "--ray-client-server-port=23456"]
    subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *words], check=True, timeout=HANG_S
    )
    address = (temp / "r" / "ray_current_cluster").read_text().strip()
    members = ray_processes(temp)
    try:
        root = Home.open(tmp_path / "s").root
        engine = RayEngine(root, address=address, rank_command=FAKE)
        engine.start(spec(root))
        poll_until(engine, "started")
        ranks = wait_for_pids(root)
        (head,) = [pid for pid, words in members.items() if words[0].endswith(b"gcs_server")]
        os.kill(head, signal.SIGKILL)
        engine.post(command(1))
        poll_until(engine, "applied")  # actors are reached without it
        assert poll_until(engine, "died")[-1].body["reason"].startswith("Ray is lost:")
        assert all(is_gone(pid) for pid in ranks)
        with pytest.raises(RuntimeError, match="Ray must be reachable to start gang g"):
            engine.start(spec(root, epoch=2))
        engine.close()
    finally:
        for pid in {**members, **ray_processes(temp)}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        shutil.rmtree(temp, ignore_errors=True)


def ray_processes(temp: Path) -> dict[int, list[bytes]]:
    """Command lines of the processes that name a folder."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(f"{temp}/r".encode() in word for word in words) and int(path.name) != os.getpid():
            found[int(path.name)] = words
    return found
