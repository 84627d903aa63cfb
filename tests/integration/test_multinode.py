"""Two torchrun agents with a rendezvous: results, a restart, a dead node.

Each node is a network namespace of this machine, or localhost where there are none; its ranks are
processes over gloo. What is compared with is the same run on one node.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import wait_until
from tests.helpers.nodes import Agent, Network, agents, two_nodes
from tests.helpers.scenario import JOBS, assert_same_bits, make_scenario, records
from tests.helpers.standing_world import world
from tlora_megatron.training.formats.checkpoint import find_checkpoint

NAMES = ("attention", "everything")
NUM_STEPS = 80
CHECKPOINT_EVERY = 20
"""Killed is right behind a save, far from the next: jobs of which one was saved and the other not
go on at different steps, in other micro-batches, which rounds sums another way. A busy machine may
look late, so there are many steps between two saves."""

LAYOUTS = {"TP inside, DP across": (2, 2, 1), "TP inside, PP across": (2, 2, 2)}
"""Ranks a node, TP size and PP size: what tests/distributed has on one node of four processes."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with two_nodes() as network:
        if network.reason is not None:
            warnings.warn(f"both nodes are localhost: {network.reason}", stacklevel=1)
        yield network


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two uneven jobs, one with dropout."""
    jobs = [job for job in JOBS if job["name"] in NAMES]
    # Room for all batches: a resumed run then packs the same micro-batches.
    run = {"micro_batch_tokens": 2048, "checkpoint_every_steps": CHECKPOINT_EVERY}
    sizes: dict[str, Any] = {"num_layers": 2, "num_steps": NUM_STEPS}
    root = tmp_path_factory.mktemp("nodes")
    return make_scenario(root, jobs, dropout={"everything": 0.1}, run=run, **sizes)


class Training:
    """A run of `tlora train`, and its files."""

    def __init__(self, config: Path, output_dir: Path, *, tp: int = 1, pp: int = 1) -> None:
        self.output_dir = output_dir
        sizes = (f"--set=parallel.tp_size={tp}", f"--set=parallel.pp_size={pp}")
        command = ("tlora_megatron.cli", "train", config, *sizes, f"--output-dir={output_dir}")
        self.target: tuple[object, ...] = ("-m", *command)

    def on_one_node(self, nproc: int) -> None:
        world(str(self.target[1]), nproc, *self.target[2:])

    def job(self, name: str) -> Path:
        return self.output_dir / "jobs" / name

    def steps(self, name: str) -> list[int]:
        if not (self.job(name) / "metrics.jsonl").exists():
            return []
        return [line["step"] for line in records(self.output_dir, name) if "loss" in line]

    def has_saved(self, count: int) -> bool:
        """True once all jobs have stepped behind so many checkpoints; the last is on the disk."""
        step = count * CHECKPOINT_EVERY
        return all(
            len(self.steps(name)) > step
            and (self.job(name) / "checkpoints" / f"step_{step:08d}").exists()
            for name in NAMES
        )

    def saved_steps(self) -> dict[str, int]:
        found = {name: find_checkpoint(self.job(name) / "checkpoints") for name in NAMES}
        return {name: checkpoint.step for name, checkpoint in found.items() if checkpoint}


@pytest.fixture(scope="module")
def whole(config: Path) -> Training:
    training = Training(config, config.parent / "whole")
    training.on_one_node(2)
    return training


def assert_same(found: Training, expected: Training) -> None:
    for name in NAMES:
        assert found.steps(name) == list(range(1, NUM_STEPS + 1)), name
        assert_same_bits(found.output_dir, expected.output_dir, name)


def finish(nodes: tuple[Agent, Agent]) -> None:
    for node in nodes:
        assert node.wait() == 0, node.output()[-8000:]


@pytest.mark.slow
@pytest.mark.four_processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_nodes_equal_one(network: Network, config: Path, tmp_path: Path, layout: str) -> None:
    """One rank a node, data-parallel across them, is what the tests below interrupt."""
    nproc, tp, pp = LAYOUTS[layout]
    alone = Training(config, tmp_path / "alone", tp=tp, pp=pp)
    alone.on_one_node(2 * nproc)
    training = Training(config, tmp_path / "out", tp=tp, pp=pp)
    with agents(network, tmp_path / "logs", nproc, training.target) as nodes:
        finish(nodes)
    assert_same(training, alone)


@pytest.mark.parametrize(
    # Node 0 is the harder one: ranks meet there.
    "victim",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=[pytest.mark.slow, pytest.mark.four_processes]),
    ],
)
def test_a_dead_rank_is_restarted_and_a_dead_node_ends_the_run_which_goes_on_by_the_same_command(
    network: Network, config: Path, whole: Training, tmp_path: Path, victim: int
) -> None:
    training = Training(config, tmp_path / "out")
    with agents(network, tmp_path / "first", 1, training.target, max_restarts=1) as nodes:
        survivor = nodes[1 - victim]
        wait_until(lambda: training.has_saved(1), "a step behind a save")
        (rank,) = survivor.ranks()
        rank.kill()
        wait_until(lambda: training.has_saved(2), "a step behind a save of the restarted ranks")
        assert not is_alive(rank)
        ranks = [rank for node in nodes for rank in node.ranks()]
        nodes[victim].kill()
        assert survivor.wait() != 0
        wait_until(lambda: not any(map(is_alive, ranks)), "the ranks' end")
        # torchrun's own words where the rendezvous was on the dead node.
        said = "the connection to another process of this run is lost: that process or its node"
        assert said in survivor.output() or (
            victim == 0 and "The connection to the C10d store has failed" in survivor.output()
        )
    saved = training.saved_steps()
    assert all(CHECKPOINT_EVERY < saved[name] < NUM_STEPS for name in NAMES), saved
    with agents(network, tmp_path / "second", 1, training.target) as nodes:
        finish(nodes)
    assert_same(training, whole)


def is_alive(process: Any) -> bool:
    """True if a process runs; one that has ended and is not yet collected does not."""
    return process.is_running() and process.status() != "zombie"
