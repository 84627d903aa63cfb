"""The engine `slurm` in an allocation of a real SLURM, whose two nodes are this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engine_case import (
    FAKE,
    EngineCase,
    OpenEngine,
    is_gone,
    poll_until,
    spec,
    wait_for_pids,
)
from tests.helpers.launch import wait_until
from tests.helpers.real_gang import digests, drive
from tests.helpers.slurm import Slurm, slurm, why_no_slurm
from tlora_megatron.service.engines.slurm_engine import SlurmEngine, complaints
from tlora_megatron.service.messages import GangFolder

NEEDS_SLURM = pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def allocation(cluster: Slurm) -> Iterator[str]:
    words = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--no-shell"]
    cluster.call(*words)
    job = cluster.call("squeue", "--noheader", "--format=%i").strip()
    yield job
    cluster.call("scancel", job)


@pytest.fixture
def open_engine(
    cluster: Slurm, allocation: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenEngine]:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", allocation)
    engines = []

    def open_engine() -> SlurmEngine:
        engines.append(SlurmEngine(root, rank_command=FAKE))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@NEEDS_SLURM
class TestSlurm(EngineCase):
    def test_ranks_sit_where_the_spec_says(self, open_engine: OpenEngine, root: Path) -> None:
        engine = open_engine()
        assert [node.gpus for node in engine.nodes()] == [4, 4]
        engine.start(spec(root, places=((1, 3), (0, 2), (0, 0))))
        poll_until(engine, "started")
        wait_for_pids(root, 3)
        folder = GangFolder(root, "g", 1)
        logs = [folder.log(rank) for rank in range(3)]
        wait_until(lambda: all("sits at" in log.read_text() for log in logs), "words of the ranks")
        for rank, gpu in enumerate("320"):
            assert f"rank {rank} sits at '{gpu}'" in folder.log(rank).read_text()
            assert folder.log(rank).stat().st_mode & 0o077 == 0
        assert folder.read_json("spec.json")["gpus"] == [[1, 3], [0, 2], [0, 0]]
        assert engine.kill("g", 1)

    def test_gang_whose_srun_is_killed(self, open_engine: OpenEngine, root: Path) -> None:
        """A process beside srun has SLURM end the step then, and the engine tells of it."""
        engine = open_engine()
        engine.start(spec(root))
        poll_until(engine, "started")
        ranks = wait_for_pids(root)
        srun = int((GangFolder(root, "g", 1).path / "srun.pid").read_text().split()[0])
        os.kill(srun, signal.SIGKILL)
        assert "died" in [event.kind for event in poll_until(engine, "died")]
        wait_until(lambda: all(is_gone(pid) for pid in ranks), "the ranks' end")
        assert not any(info.alive for info in engine.gangs())

    def test_gang_that_ended_while_nobody_looked(self, open_engine: OpenEngine, root: Path) -> None:
        engine = open_engine()
        engine.start(spec(root))
        poll_until(engine, "started")
        for pid in wait_for_pids(root):
            os.kill(pid, signal.SIGKILL)
        assert poll_until(open_engine(), "died")[-1].body["rank"] in (0, 1)

    def test_step_that_slurm_refuses(
        self, open_engine: OpenEngine, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = open_engine()
        monkeypatch.setattr(engine.allocation, "names", ("elsewhere", "n2"))
        engine.start(spec(root))
        reason = poll_until(engine, "died")[-1].body["reason"]
        assert reason.startswith("SLURM has not started the gang, srun said: srun: error:")

    @pytest.mark.slow
    def test_real_gang_over_two_nodes_keeps_its_bits(
        self, open_engine: OpenEngine, cluster: Slurm, allocation: str, root: Path, tmp_path: Path
    ) -> None:
        open_engine()  # its environment stays
        engine = SlurmEngine(root)
        killed = digests(engine, root, ((0, 0), (1, 0)), kill=True)
        engine.close()
        assert killed == drive("plain", tmp_path / "local")["digests"]

    def test_outside_an_allocation(
        self, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SLURM_JOB_ID")
        with pytest.raises(ValueError, match="must run inside an allocation, got no SLURM_JOB_ID"):
            open_engine()


@pytest.mark.parametrize(
    ("said", "codes"),
    [
        ("srun: error: n2: task 1: Exited with exit code 3", {1: 3}),
        ("srun: error: n[1-2]: tasks 0-1,4: Killed", {0: -9, 1: -9, 4: -9}),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)", {0: -11}),
        ("srun: error: n1: task 0: Terminated\nsrun: error: n2: task 1: Killed", {1: -9}),
        ("srun: error: n1: task 0: Terminated", {0: -15}),
        ("srun: Job step creation temporarily disabled, retrying", {}),
    ],
)
def test_words_of_srun(said: str, codes: dict[int, int]) -> None:
    assert complaints(said.splitlines()) == codes
