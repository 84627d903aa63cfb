"""Starts processes of benchmarks and waits for their end, or for the turn to measure.

A benchmark that is started while the one before it still measures finds a file named in
`TLORA_BENCH_TURN`. With its imports done it waits until that file exists, and only then touches the
GPU.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.bench.harness.arguments import REPO

TURN = "TLORA_BENCH_TURN"
MEGATRON_WORKER = Path(__file__).with_name("megatron_worker.py")
"""What torchrun starts in the place of a checkout's script, which comes behind it."""
ITERATION = "TLORA_BENCH_ITERATION"
_POLL_S = 0.02


def wait_for_turn() -> None:
    """Returns once the file that the environment names exists; at once where it names none."""
    file = os.environ.get(TURN)
    while file and not Path(file).exists():
        time.sleep(_POLL_S)


def torchrun(processes: int, *words: object) -> list[str]:
    """A command line under this Python's torchrun, on this machine alone."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    return [sys.executable, *launcher, str(processes), *map(str, words)]


def megatron_environment(checkout: Path) -> dict[str, str]:
    """The environment of a command that runs a Megatron-LM checkout's trainer."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    # The repository first: a checkout has packages `tests` and `scripts` of its own.
    paths = [str(REPO), str(checkout), os.environ.get("PYTHONPATH")]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MEGATRON_LM_PATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        # Userbuffers would use NVLink multicast, which may disturb others on a shared host.
        "UB_SKIPMC": "1",
    }


class Life(NamedTuple):
    """The end of a command."""

    code: int | None
    """Exit status; None: it took too long."""
    seconds: float
    output: str


def live(command: Sequence[str], env: Mapping[str, str], log: Path, timeout_s: float) -> Life:
    """Runs a command whose output goes to a file; behind the timeout it is killed.

    Of torchrun the agent is killed, and the ranks end with it. If this process is interrupted
    meanwhile, it prints the end of the output.
    """
    begin = time.monotonic()
    code: int | None = None
    try:
        with log.open("w") as sink, contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                command, env=env, stdout=sink, stderr=subprocess.STDOUT, timeout=timeout_s
            ).returncode
    except KeyboardInterrupt:
        print(log.read_text(errors="replace")[-4000:], flush=True)
        raise
    return Life(code, time.monotonic() - begin, log.read_text(errors="replace"))
