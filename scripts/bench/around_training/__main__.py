"""Times all of a `tlora train` command: what comes before, between and behind its rounds.

    git archive 104bb8c | tar x -C /tmp/before
    python -m scripts.bench.around_training --before /tmp/before --csv rows.csv
    python -m scripts.bench.around_training --cases toy            # on a CPU: shows that it works

Each case is one command, started as users start it and watched from outside: a step counts from the
moment that its line stands in `metrics.jsonl`. Weights are random, and in the page cache; every job
steps in every round. `before` is another checkout of the package, which takes turns with this one.

`disk_s` is what this disk takes for as many bytes as the command left behind. `round_ms` is the
median time between two rounds, `longest_ms` the longest. `behind_save_ms` and `before_save_ms` are
the means of the first and the second half of the rounds between two saves: writing goes on beside
the first. `time_s` are the phases of `summary.json`, and `stood_still_ms` the longest that rounds
waited for a save, where the package says so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.around_training.base import warm_page_cache, write_base
from scripts.bench.around_training.command import (
    CASES,
    TEXTS,
    Case,
    Watched,
    beside_saves,
    folder_bytes,
    watch,
    write_jobs,
    write_s,
)
from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.processes import wait_for_turn
from scripts.bench.harness.rows import append_rows, gpu_name, versions


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit code is 0 unless a command fails."""
    args = _parser().parse_args(argv)
    wait_for_turn()
    trees = {args.commit: REPO}
    if args.before is not None:
        trees = {args.before_commit: args.before.resolve(), **trees}
    work = Path(args.work or tempfile.mkdtemp(prefix="around_training_"))
    try:
        for case in (case for case in CASES if case.name in args.cases):
            for commit, tree in trees.items():
                _run(args, case, commit, tree, work)
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    return 0


def _run(args: argparse.Namespace, case: Case, commit: str, tree: Path, work: Path) -> None:
    base = work / "bases" / case.shape.replace(" ", "_")
    size = write_base(case.shape, base)
    warm_page_cache(base)
    output_dir, config = work / "out", work / "run.yaml"
    shutil.rmtree(output_dir, ignore_errors=True)
    write_jobs(case, base, args.texts, output_dir, config)
    caches = None if args.users_caches else work / "caches" / commit
    if case.cold and caches is not None:
        shutil.rmtree(caches, ignore_errors=True)
    watched = watch(tree, config, output_dir, caches=caches, log=work / "log.txt", nproc=args.nproc)
    written = folder_bytes(output_dir)
    disk_s = write_s(written, work / "disk")
    row = _row(case, commit, size, watched, written, disk_s)
    print(", ".join(f"{name} {value}" for name, value in list(row.items())[2:]), flush=True)
    if args.csv is not None:
        append_rows(args.csv, [row])


def _row(
    case: Case, commit: str, size: int, watched: Watched, written: int, disk_s: float
) -> dict[str, Any]:
    run, gaps_s, rounds_s = watched.summary["run"], watched.gaps_s, watched.rounds_s
    longest_s = (run.get("saving") or {}).get("longest_stop_s")
    halves = beside_saves(gaps_s, case.save_every)
    return {
        "gpu": gpu_name(), "versions": versions("megatron-core"), "commit": commit,
        "case": case.name, "base_bytes": size, "wall_s": round(watched.wall_s, 2),
        "first_step_s": round(rounds_s[0], 2), "rounds_s": round(rounds_s[-1] - rounds_s[0], 2),
        "end_s": round(watched.wall_s - rounds_s[-1], 2), "written_bytes": written,
        "disk_s": round(disk_s, 2), "round_ms": round(statistics.median(gaps_s) * 1e3, 1),
        "longest_ms": round(max(gaps_s) * 1e3, 1),
        "behind_save_ms": "" if halves is None else round(halves[0] * 1e3, 1),
        "before_save_ms": "" if halves is None else round(halves[1] * 1e3, 1),
        "trained_s": round(run["train_time_s"], 2),
        "time_s": json.dumps({k: round(v, 2) for k, v in run.get("time_s", {}).items()}),
        "stood_still_ms": "" if longest_s is None else round(longest_s * 1e3, 2),
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names[:-1])
    parser.add_argument("--before", type=Path, help="another checkout, run in turns with this one")
    parser.add_argument("--before-commit", default="104bb8c", help="what rows call it")
    parser.add_argument(
        "--texts", type=Path, default=TEXTS, help="folder of JSONL files for the jobs"
    )
    parser.add_argument("--work", type=Path, help="keep bases and caches in this folder")
    parser.add_argument("--nproc", type=int, help="processes of a command")
    parser.add_argument(
        "--users-caches",
        action="store_true",
        help="of kernels, instead of folders of this benchmark's that are empty at first",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
