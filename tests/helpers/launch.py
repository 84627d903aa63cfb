"""Starts worker scripts in processes of their own, under torchrun or alone.

Each start imports everything anew. `tests.helpers.standing_world` does the same by forks; only
tests of the start itself, and of other versions than those installed, need these.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
_PATIENCE = float(os.environ.get("TLORA_TEST_PATIENCE", "1"))
"""Factor on all limits, for machines that are slower still."""
HANG_S = 1800 * _PATIENCE
"""Ends what hangs. No test says anything about speed, so this is far above what any takes."""
_TOLD = 20_000
"""Characters of a failed process that a test shows: the traces of all ranks."""
IDLE_S = 300 * _PATIENCE
"""Ends a world of which no rank has used a processor for so long: it waits for itself."""


def torchrun(worker: Path | str, nproc: int, *args: object) -> str:
    """Runs a worker script (or dotted module) in `nproc` processes of one machine.

    Returns:
        What the processes wrote to stdout and stderr.

    Raises:
        AssertionError: if one fails or all hang; holds the end of the output.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return python(*launcher, *_target(worker), *args)


def python(*args: object) -> str:
    """Runs this Python with arguments, in one thread and without torchrun's environment.

    Raises:
        AssertionError: as `torchrun`.
    """
    code, output = outcome(*args)
    assert code == 0, f"exit {code}: {args}\n{output[-_TOLD:]}"
    return output


def outcome(*args: object, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of this Python with arguments, by default in `environment()`.

    Raises:
        AssertionError: if it hangs.
    """
    command = [sys.executable, *map(str, args)]
    process = subprocess.Popen(
        command,
        env=environment() if env is None else env,
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        # torchrun ends its workers when asked to; killed outright, it would leave them behind.
        process.terminate()
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"took over {HANG_S} s: {command}\n{output[-_TOLD:]}") from None
    return process.returncode, output


def environment() -> dict[str, str]:
    """The environment of a process of one thread that torchrun has not started."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPO)]))
    return inherited | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "PET_LOG_DIR": os.devnull,  # torchrun would leave an empty folder behind
    }


def imported(code: str, *packages: str, speaks: bool = False) -> set[str]:
    """Which of some packages a fresh Python has imported behind some code.

    Args:
        speaks: the code may write to stderr.
    """
    code = f"{code}\nimport sys\nprint('IMPORTED', *{set(packages)} & {{*sys.modules}})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert speaks or not done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def modules_in(part: str) -> list[str]:
    """Dotted names of all modules in a folder of the package, or of one module."""
    package = REPO / "tlora_megatron"
    files = sorted((package / part).rglob("*.py")) or [package / f"{part}.py"]
    names = (".".join(file.relative_to(REPO).with_suffix("").parts) for file in files)
    return [name.removesuffix(".__init__") for name in names]


def wait_until(
    holds: Callable[[], bool], what: str, said: Callable[[], object] = lambda: ""
) -> None:
    """Looks every 10 ms until something holds.

    Raises:
        AssertionError: naming `what`, with what is `said` of it then, if it never comes true.
    """
    end_s = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end_s, f"{what}: not within {HANG_S} s\n{said()}"
        time.sleep(0.01)


def _target(worker: Path | str) -> list[str]:
    is_module = isinstance(worker, str) and not worker.endswith(".py")
    return ["-m", str(worker)] if is_module else [str(worker)]
