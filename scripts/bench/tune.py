#!/usr/bin/env python3
"""Tunes the blocks of the fused kernels on this GPU and writes the winners into `ops/tuned.json`.

    python scripts/bench/tune.py --csv tuning.csv                 # every kernel, 3 row buckets
    python scripts/bench/tune.py --kernels down --tokens 8192 --dry-run

A bucket is a number of rows, and with `--sizes` the size a kernel's work grows with (`in_size` of
down and backward_down, `out_size` of up and backward_up); the largest of each is unbounded. Within
a bucket the geometric mean over its shapes and adapters is minimised by coordinate descent. Before
it counts, a winner is timed once more in turns with the blocks used until now. Results are not
checked here: `lora_linear.py` does that in every cell. `--dry-run` writes no table.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tuning_table
from linear_measure import Versions, linear_ops, versions
from linear_results import geometric_mean
from linear_shapes import MEASURED, SHAPES, adapter_mix
from linear_workload import make_workload
from lora_linear import names_of, numbers
from result_rows import checkout_commit, write_rows
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from timing import Replay, time_interleaved, warm_up
from tuning_cases import KernelCase
from tuning_space import GAIN, SIZE_OF, SPACE, Found, best_of, search, search_length

from tlora_megatron.ops.lora.linear_ops import LinearOps
from tlora_megatron.ops.lora.triton.config import choose_config


class Bucket(NamedTuple):
    """Sizes that share blocks."""

    kernel: str
    bounds: tuple[tuple[str, int], ...]
    cases: tuple[KernelCase, ...]

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join(f"{name} <= {most}" for name, most in self.bounds) or "any size"


class Tuner:
    """Times blocks of kernels and searches the best."""

    def __init__(self, args: argparse.Namespace, ops: LinearOps, progress: Progress) -> None:
        self._args = args
        self._ops = ops
        self._progress = progress
        self._deadline = time.monotonic() + args.budget_s
        self.rows: list[dict[str, Any]] = []
        """One a candidate."""

    @property
    def in_time(self) -> bool:
        """Whether there is time to try another candidate."""
        return time.monotonic() < self._deadline

    def tune(self, bucket: Bucket, table: tuning_table.Table) -> tuning_table.Winner:
        """Searches a bucket from the blocks that the table gives it now."""
        start = self._current(bucket, table)
        task = self._progress.add_task(
            f"{bucket.kernel}, {bucket.name}", total=search_length(bucket.kernel)
        )
        found: list[Found] = []
        for candidate in search(
            bucket.kernel,
            start,
            lambda config: self._time_us(bucket, config),
            in_time=lambda: self.in_time,
        ):
            found.append(candidate)
            self.rows.append(self._row(bucket, candidate, found[0].us))
            self._progress.advance(task)
        best = best_of(found)
        if math.isinf(best.us):
            raise RuntimeError(f"some blocks of {bucket.kernel} must run on this GPU, got none")
        before_us, after_us = found[0].us, best.us
        if math.isfinite(before_us):
            before_us, after_us = self._compared(bucket, start, best.config)
        if after_us > GAIN * before_us:
            return self._winner(bucket, start, before_us, before_us)
        return self._winner(bucket, best.config, before_us, after_us)

    def _current(self, bucket: Bucket, table: tuning_table.Table) -> Any:
        case = bucket.cases[0]
        sizes = {"rows": case.tokens, "in_size": case.in_size, "out_size": case.out_size}
        return getattr(choose_config(table, self._args.versions.gpu, sizes), bucket.kernel)

    def _time_us(self, bucket: Bucket, config: Any) -> float:
        """Geometric mean over a bucket's cases; inf where the blocks do not run."""
        try:
            each = [
                time_interleaved([self._replay(bucket, case, config)], self._args.device, 10)[0]
                for case in bucket.cases
            ]
        except Exception as problem:  # too much shared memory, say: that is what a search finds out
            if self._args.device.type == "cuda":
                torch.cuda.synchronize()  # raises where the process is beyond repair
            self._progress.console.log(f"{config}: {type(problem).__name__}: {str(problem)[:120]}")
            return math.inf
        return geometric_mean([sample.median_us for sample in each])

    def _compared(self, bucket: Bucket, start: Any, best: Any) -> tuple[float, float]:
        """Both timed in turns, case by case."""
        pairs = []
        for case in bucket.cases:
            replays = [self._replay(bucket, case, config) for config in (start, best)]
            pairs.append([s.median_us for s in time_interleaved(replays, self._args.device)])
        before, after = zip(*pairs, strict=True)
        return geometric_mean(before), geometric_mean(after)

    def _replay(self, bucket: Bucket, case: KernelCase, config: Any) -> Replay[object]:
        with tuning_table.blocks_in_use(**{bucket.kernel: config}):
            calls = case.calls(bucket.kernel, self._ops)
            warm_up(lambda: [call() for call in calls], self._args.device)
            return Replay(calls, self._args.device)

    def _row(self, bucket: Bucket, found: Found, first_us: float) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self._args.versions),
            "kernel": bucket.kernel,
            "bucket": bucket.name,
            "config": json.dumps(dataclasses.asdict(found.config)),
            "us": f"{found.us:.4g}",
            "ratio": f"{found.us / first_us:.4f}",
        }

    def _winner(
        self, bucket: Bucket, config: Any, before_us: float, after_us: float
    ) -> tuning_table.Winner:
        found: Versions = self._args.versions
        return tuning_table.Winner(
            gpu=found.gpu,
            kernel=bucket.kernel,
            bounds=bucket.bounds,
            config=config,
            before_us=before_us,
            after_us=after_us,
            torch=found.torch,
            triton=found.triton,
            commit=found.commit,
            date=datetime.date.today().isoformat(),
        )


def buckets(args: argparse.Namespace) -> list[Bucket]:
    """Every bucket that some shape falls into, those of fewer rows and smaller sizes first."""
    cases = [
        KernelCase(
            make_workload(SHAPES[shape], tokens, device=args.device, dtype=torch.bfloat16),
            adapter_mix(tokens, adapters),
            args.dropout,
        )
        for tokens, shape, adapters in itertools.product(args.tokens, args.shapes, args.adapters)
    ]
    found = []
    limits = (*sorted(args.sizes), None)
    for kernel, rows, size in itertools.product(args.kernels, sorted(args.tokens), limits):
        inside = tuple(
            c
            for c in cases
            if c.tokens == rows and bucket_of(getattr(c, SIZE_OF[kernel]), limits) == size
        )
        bounds = [("rows", rows)] if rows < max(args.tokens) else []
        bounds += [(SIZE_OF[kernel], size)] if size is not None else []
        if inside:
            found.append(Bucket(kernel, tuple(bounds), inside))
    return found


def bucket_of(size: int, limits: Sequence[int | None]) -> int | None:
    """The first limit, ascending, that a size is within; None = above all."""
    return next((limit for limit in limits if limit is not None and size <= limit), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Tunes, prints and writes."""
    args = _arguments(argv)
    table = tuning_table.read(args.table)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(log_path=False, width=None if sys.stdout.isatty() else 160)
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        name = "tlora_triton" if args.device.type == "cuda" else "tlora"
        tuner = Tuner(args, linear_ops(name, args.device, torch.bfloat16), progress)
        for bucket in buckets(args):
            if not tuner.in_time:
                progress.console.log(f"{bucket.kernel}, {bucket.name}: no time left")
                continue
            winner = tuner.tune(bucket, table)
            progress.console.log(
                f"{bucket.kernel}, {bucket.name}: {winner.before_us:.1f} -> "
                f"{winner.after_us:.1f} us, {winner.fields or 'the default'}"
            )
            table = tuning_table.add(table, winner)
            if not args.dry_run:
                tuning_table.write(args.table, table)
    if args.csv is not None:
        write_rows(args.csv, tuner.rows)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", type=names_of(SPACE), default=tuple(SPACE))
    parser.add_argument("--shapes", type=names_of(SHAPES), default=MEASURED)
    parser.add_argument("--tokens", type=numbers(int), default=(2048, 8192, 16384))
    parser.add_argument("--sizes", type=numbers(int), default=(), help="bounds of size buckets")
    parser.add_argument("--adapters", type=numbers(int), default=(16,))
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--dry-run", action="store_true", help="measure, but write no table")
    parser.add_argument("--table", type=Path, default=tuning_table.TABLE)
    parser.add_argument("--csv", type=Path, help="write every candidate's time here")
    parser.add_argument("--commit", default="", help="where git is not at hand")
    parser.add_argument("--device", type=torch.device, default=None)
    args = parser.parse_args(argv)
    if args.device is None:
        args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.versions = versions(args.device, args.commit or checkout_commit())
    return args


if __name__ == "__main__":
    sys.exit(main())
