"""Two torchrun agents with a rendezvous: results, a restart, a dead node.

Each node is a network namespace of this machine, or localhost where there are none; its ranks are
processes over gloo. What is compared with is the same run on one node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.launch import HANG_S, REPO, environment, wait_until
from tests.helpers.scenario import JOBS, assert_same_bits, make_scenario, records
from tests.helpers.standing_world import world
from tlora_megatron.runtime.ranks import free_port
from tlora_megatron.training.formats.checkpoint import find_checkpoint

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
