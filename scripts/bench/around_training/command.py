"""One `tlora train` command watched from outside: when it steps, when it ends."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """Times of one command, in seconds since it was started."""

    wall_s: float
    first_step_s: float
    last_step_s: float
    round_s: float
    """Median time between two rounds."""
    longest_s: float
    """Longest time between two rounds."""
    gaps_s: tuple[float, ...]
    """All times between two rounds."""
    summary: dict[str, Any]


def watch(
    tree: Path, config: Path, output_dir: Path, *, caches: Path | None, log: Path, nproc: int | None
) -> Watched:
    """Trains with the package that lies in `tree` and reads its metrics while they are written.

    Args:
        caches: folder of built kernels; None = the user's.

    Raises:
        RuntimeError: with its last lines, if the command fails.
    """
    command = [sys.executable, "-m", "tlora_megatron.cli", "train", str(config)]
    command += [] if nproc is None else ["--nproc", str(nproc)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    }
    if caches is not None:
        environment["TLORA_CACHE_DIR"] = str(caches / "cuda")
        environment["TRITON_CACHE_DIR"] = str(caches / "triton")
    with log.open("w") as file:
        begin_s = time.monotonic()
        # From its own folder: Python would find the package in the present one first.
        process = subprocess.Popen(command, env=environment, cwd=tree, stdout=file, stderr=file)
        rounds_s = _rounds(process, output_dir / "jobs" / "job0" / "metrics.jsonl", begin_s)
        wall_s = time.monotonic() - begin_s
    if process.returncode or len(rounds_s) < 2:
        tail = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {tail}")
    gaps = [after - before for before, after in itertools.pairwise(rounds_s)]
    return Watched(
        wall_s=wall_s,
        first_step_s=rounds_s[0],
        last_step_s=rounds_s[-1],
        round_s=statistics.median(gaps),
        longest_s=max(gaps),
        gaps_s=tuple(gaps),
        summary=json.loads((output_dir / "summary.json").read_text()),
    )


def beside_saves(gaps_s: Sequence[float], every: int) -> tuple[float, float] | None:
    """Returns the mean round of the halves behind and before a save; None where no round is saved.

    A save holds up the rounds of the first half of its interval, if any; the last interval, which
    ends with the run, does not count.

    Args:
        gaps_s: times between two rounds, the first one behind round 1.
        every: rounds between two saves.
    """
    half, last = every // 2, len(gaps_s) + 1
    saves = range(every, last - every + 1, every) if half else ()
    if not saves:
        return None
    behind = [gap for save in saves for gap in gaps_s[save - 1 : save - 1 + half]]
    before = [gap for save in saves for gap in gaps_s[save - 1 + every - half : save - 1 + every]]
    return statistics.mean(behind), statistics.mean(before)


def _rounds(process: subprocess.Popen[bytes], metrics: Path, begin_s: float) -> Sequence[float]:
    """Waits for the end; returns when each of the first job's steps was logged."""
    seen: list[float] = []
    while True:
        has_ended = process.poll() is not None  # before the look, which then sees the last step
        steps = metrics.read_bytes().count(b'"loss"') if metrics.exists() else 0
        seen += [time.monotonic() - begin_s] * (steps - len(seen))
        if has_ended:
            return seen
        time.sleep(_POLL_S)
