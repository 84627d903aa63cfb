"""The commands that are timed, watched from outside, and what the disk takes for bytes alone."""

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

import yaml

from scripts.bench.harness.arguments import REPO
from tlora_megatron.config.job import HF_TARGETS

RANKS = (4, 8, 16, 16, 32, 32, 64, 64)
_POLL_S = 0.01
TEXTS = REPO / "configs" / "quickstart" / "data"
"""Where no folder of texts is named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run over one of the bases, with every job stepping in every round."""

    name: str
    shape: str
    rounds: int
    save_every: int
    """Steps between two checkpoints; 0 = at the end only."""
    jobs: int = 8
    tokens: int = 8192
    """Tokens of a micro-batch; a job's sequences are cut to its share."""
    cold: bool = False
    """With empty caches of kernels."""


CASES = (
    Case(name="8b, 60 rounds", shape="8b", rounds=60, save_every=50),
    Case(name="8b, saves every 50", shape="8b", rounds=110, save_every=50),
    Case(name="8b, saves at the end", shape="8b", rounds=110, save_every=0),
    Case(name="8b, 300 rounds", shape="8b", rounds=300, save_every=50),
    Case(name="six layers, first time", shape="six layers", rounds=25, save_every=0, cold=True),
    Case(name="six layers", shape="six layers", rounds=25, save_every=0),
    Case(name="toy", shape="toy", rounds=6, save_every=2, jobs=3, tokens=384),
)


def write_jobs(case: Case, base: Path, texts: Path, output_dir: Path, file: Path) -> None:
    length = case.tokens // case.jobs
    jobs = [
        job_document(n, texts, length=length, batch_size=1, max_steps=case.rounds)
        for n in range(case.jobs)
    ]
    document = {
        "base_model": {"path": str(base), "dtype": "bfloat16"},
        "run": {
            "output_dir": str(output_dir),
            "micro_batch_tokens": case.tokens,
            "checkpoint_every_steps": case.save_every,
        },
        "jobs": jobs,
    }
    file.write_text(yaml.safe_dump(document, sort_keys=False))


def job_document(number: int, texts: Path, *, length: int, **more: Any) -> dict[str, Any]:
    """A job's part of a configuration: one of `RANKS`, one of the files of a folder of texts."""
    found = sorted(path for path in texts.glob("*.jsonl") if not path.stem.endswith("_eval"))
    if not found:
        raise ValueError(f"--texts must be a folder with JSONL files, got {texts}")
    rank = RANKS[number % len(RANKS)]
    return {
        "name": f"job{number}", "data": {"train": str(found[number % len(found)].resolve())},
        "lora": {"rank": rank, "alpha": 2 * rank, "target_modules": list(HF_TARGETS)},
        "max_seq_len": length, "optimizer": {"lr": 1e-4}, **more,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """Times of one command, in seconds since it was started."""

    wall_s: float
    rounds_s: Sequence[float]
    """When each round had ended."""
    summary: dict[str, Any]

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.rounds_s)]


def watch(
    tree: Path, config: Path, output_dir: Path, *, caches: Path | None, log: Path, nproc: int | None
) -> Watched:
    """Trains with the package that lies in `tree` and reads its metrics while they are written.

    Args:
        caches: folder of built kernels; None = the user's.
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
    summary = json.loads((output_dir / "summary.json").read_text())
    return Watched(wall_s=wall_s, rounds_s=rounds_s, summary=summary)


def beside_saves(gaps_s: Sequence[float], every: int) -> tuple[float, float] | None:
    """Returns the mean round of the halves behind and before a save; None where no round is saved.

    A save holds up the rounds of the first half of its interval, if any; the last interval, which
    ends with the run, does not count. The first gap is the one behind round 1.
    """
    half, last = every // 2, len(gaps_s) + 1
    saves = range(every, last - every + 1, every) if half else ()
    if not saves:
        return None
    behind = [gap for save in saves for gap in gaps_s[save - 1 : save - 1 + half]]
    before = [gap for save in saves for gap in gaps_s[save - 1 + every - half : save - 1 + every]]
    return statistics.mean(behind), statistics.mean(before)


def _rounds(process: subprocess.Popen[bytes], metrics: Path, begin_s: float) -> Sequence[float]:
    seen: list[float] = []
    while True:
        has_ended = process.poll() is not None  # before the look, which then sees the last step
        steps = metrics.read_bytes().count(b'"loss"') if metrics.exists() else 0
        seen += [time.monotonic() - begin_s] * (steps - len(seen))
        if has_ended:
            return seen
        time.sleep(_POLL_S)


_BLOCK_BYTES = 64 << 20


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_s(num_bytes: int, file: Path) -> float:
    """Seconds for a file of so many bytes, written by one thread and flushed; it is removed."""
    block = os.urandom(_BLOCK_BYTES)
    begin_s = time.monotonic()
    with file.open("wb", buffering=0) as opened:
        for begin in range(0, num_bytes, _BLOCK_BYTES):
            opened.write(block[: num_bytes - begin])
        os.fsync(opened.fileno())
    taken_s = time.monotonic() - begin_s
    file.unlink()
    return taken_s
