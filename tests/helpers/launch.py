"""Starts worker scripts in processes of their own, under torchrun or alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def torchrun(worker: Path | str, nproc: int, *args: object, timeout: float = 240) -> str:
    """Runs a worker script (or dotted module) in `nproc` processes of one machine.

    Args:
        timeout: in seconds.

    Returns:
        What the processes wrote to stdout and stderr.

    Raises:
        AssertionError: if one fails or all take too long; holds the end of the output.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return python(*launcher, *_target(worker), *args, timeout=timeout)


def python(*args: object, timeout: float = 240) -> str:
    """Runs this Python with arguments, in one thread and without torchrun's environment.

    Raises:
        AssertionError: as `torchrun`.
    """
    command = [sys.executable, *map(str, args)]
    process = subprocess.Popen(
        command,
        env=_environment(),
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # torchrun ends its workers when asked to; killed outright, it would leave them behind.
        process.terminate()
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"took over {timeout} s: {command}\n{output[-8000:]}") from None
    assert process.returncode == 0, f"exit {process.returncode}: {command}\n{output[-8000:]}"
    return output


def _target(worker: Path | str) -> list[str]:
    is_module = isinstance(worker, str) and not worker.endswith(".py")
    return ["-m", str(worker)] if is_module else [str(worker)]


def _environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPO)]))
    return inherited | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    }
