#!/usr/bin/env python3
"""Each Triton kernel of the multi-adapter linear: is it right, how far is it from its floor?

    python scripts/bench/kernel_times.py [--shapes 8b_qkv ...] [--tokens 2048 8192] [--csv OUT.csv]
    python scripts/bench/kernel_times.py --sweep down backward_up --minutes 4

The floor is the bytes a kernel must move (activations and factors once, gradients read and written)
at the bandwidth that a copy reaches in the same run. Times are medians over CUDA-graph replays on
rotated buffers. `--sweep` times lists of blocks instead and prints the best a kernel and point;
they are compiled by several processes first, into Triton's cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kernel_cases import Case, Point
from result_rows import write_rows
from timing import Replay, time_interleaved, warm_up

from tlora_megatron.ops.lora.triton.config import KernelConfig

KERNELS = ("down", "up", "dgrad", "backward_up", "backward_down")
BLOCKS_OF = {"dgrad": "up"}
"""Kernels whose blocks have another name in `KernelConfig`."""
_WARPS_STAGES = [{"num_warps": w, "num_stages": s} for w in (4, 8) for s in (3, 4, 5)]
CANDIDATES: dict[str, list[dict[str, int]]] = {
    "down": [
        {"block_rows": rows, "block_depth": depth, "splits": splits, **rest}
        for rows, depth in ((64, 64), (64, 128), (32, 128))
        for splits in (1, 2, 4)
        for rest in _WARPS_STAGES
        if depth * rest["num_stages"] <= 512
    ],
    "up": [
        {"block_rows": rows, "block_columns": columns, "num_warps": warps}
        for rows, columns in ((64, 64), (64, 128), (128, 128), (64, 256))
        for warps in (4, 8)
    ],
    "backward_up": [
        {"rows_per_run": run, "split_columns": split, "region_rows": run, **rest}
        for run, split in ((512, 1024), (1024, 1024), (1024, 2048), (2048, 4096))
        for rest in (
            {},
            {"num_stages": 4},
            {"num_stages": 4, "rank_tile": 128},
            {"num_stages": 4, "num_warps": 4},
            {"num_stages": 5, "num_warps": 4, "step_rows": 32},
            {"num_stages": 3, "block_depth": 128},
        )
    ],
    "backward_down": [
        {"rows_per_run": run, **rest}
        for run in (256, 512, 1024, 2048)
        for rest in (
            {},
            {"num_stages": 4},
            {"num_stages": 4, "rank_tile": 128},
            {"num_stages": 4, "num_warps": 4},
            {"num_stages": 5, "num_warps": 4, "step_rows": 32},
            {"num_stages": 4, "block_columns": 64},
        )
    ],
}


class Result(NamedTuple):
    """One kernel at one point with one choice of blocks."""

    point: Point
    kernel: str
    blocks: str
    us: float
    floor_us: float
    error: float

    @property
    def ratio(self) -> float:
        """Time over floor."""
        return self.us / self.floor_us

    def cells(self) -> dict[str, Any]:
        """Values by column."""
        own = self._asdict()
        return own.pop("point")._asdict() | own


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of copies of 1 GiB."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    replay = Replay([lambda: b.copy_(a)], device)
    (sample,) = time_interleaved([replay], device)
    return 2 * a.numel() / (sample.median_us * 1e-6)


def configured(kernel: str, fields: dict[str, int]) -> KernelConfig:
    """The default blocks with some fields of one kernel changed."""
    name = BLOCKS_OF.get(kernel, kernel)
    blocks = dataclasses.replace(getattr(KernelConfig(), name), **fields)
    return dataclasses.replace(KernelConfig(), **{name: blocks})


def measure(case: Case, point: Point, kernels: Sequence[str], bandwidth: float) -> list[Result]:
    """Every kernel with the default blocks, checked first."""
    device = case.workload.device
    errors = case.errors(KernelConfig())
    replays = []
    for kernel in kernels:
        calls = case.calls(kernel, KernelConfig())
        warm_up(lambda calls=calls: [call() for call in calls], device)
        replays.append(Replay(calls, device))
    samples = time_interleaved(replays, device)
    return [
        Result(
            point,
            kernel,
            "default",
            sample.median_us,
            case.floor_bytes(kernel) / bandwidth * 1e6,
            errors[kernel],
        )
        for kernel, sample in zip(kernels, samples, strict=True)
    ]


def sweep(case: Case, point: Point, kernel: str, bandwidth: float, deadline: float) -> list[Result]:
    """Every candidate of a kernel, as long as there is time."""
    device = case.workload.device
    replays, names = [], []
    for fields in ({}, *CANDIDATES[BLOCKS_OF.get(kernel, kernel)]):
        if time.monotonic() > deadline:
            break
        calls = case.calls(kernel, configured(kernel, fields))
        try:
            warm_up(lambda calls=calls: [call() for call in calls], device)
            replays.append(Replay(calls, device))
        except Exception as error:  # too much shared memory, say: Triton raises its own
            print(f"{kernel} {fields}: {type(error).__name__} {str(error)[:80]}")
            continue
        names.append(" ".join(f"{k}={v}" for k, v in fields.items()) or "default")
    floor_us = case.floor_bytes(kernel) / bandwidth * 1e6
    samples = time_interleaved(replays, device, rounds=10) if replays else []
    return [
        Result(point, kernel, name, sample.median_us, floor_us, float("nan"))
        for name, sample in zip(names, samples, strict=True)
    ]


def _compile(job: tuple[Point, list[tuple[str, dict[str, int]]]]) -> None:
    """Runs candidates once on as few rows as specialise alike."""
    point, candidates = job
    case = Case(point, torch.device("cuda"))
    for kernel, fields in candidates:
        try:
            case.calls(kernel, configured(kernel, fields))[0]()
        except Exception:  # reported where it is timed
            continue
    torch.cuda.synchronize()


def precompile(points: Sequence[Point], kernels: Sequence[str], processes: int) -> None:
    """Fills Triton's cache; each process takes a share of the candidates."""
    pairs = [(k, f) for k in kernels for f in ({}, *CANDIDATES[BLOCKS_OF.get(k, k)])]
    small = {compile_key(p): p._replace(tokens=512) for p in points}.values()
    jobs = [(p, pairs[i::4]) for p in small for i in range(4)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(_compile, jobs, chunksize=1)


def compile_key(point: Point) -> tuple[str, bool, bool]:
    """Points with the same key compile the same kernels."""
    return point.shape, point.adapters > 1, point.dropout > 0


def show(results: Sequence[Result]) -> None:
    """One line a result, the slowest against its floor last."""
    print(f"{'point':32} {'kernel':14} {'us':>8} {'floor':>8} {'ratio':>6} {'error':>9}  blocks")
    for r in results:
        point = f"{r.point.shape} {r.point.tokens} x{r.point.adapters} p={r.point.dropout}"
        numbers = f"{r.us:8.1f} {r.floor_us:8.1f} {r.ratio:6.2f} {r.error:9.1e}"
        print(f"{point:32} {r.kernel:14} {numbers}  {r.blocks}")


def show_best(results: Sequence[Result]) -> None:
    """Best blocks of each kernel and number of tokens over all its points, and point by point."""
    groups: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    points: dict[tuple[str, Point], list[Result]] = defaultdict(list)
    for r in results:
        groups[r.kernel, r.point.tokens][r.blocks].append(r.ratio)
        points[r.kernel, r.point].append(r)
    for (kernel, tokens), blocks in groups.items():
        most = max(map(len, blocks.values()))
        means = {b: statistics.geometric_mean(v) for b, v in blocks.items() if len(v) == most}
        print(f"\n{kernel}, {tokens} tokens: time over floor, geometric mean of {most} points")
        for name in sorted(means, key=means.__getitem__)[:6]:
            print(f"  {means[name]:6.3f}  {name}")
        print(f"  {means.get('default', float('nan')):6.3f}  default")
    print()
    show([min(found, key=lambda r: r.us) for found in points.values()])


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["8b_qkv", "8b_o", "8b_gate_up", "8b_down"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--dropout", nargs="+", type=float, default=[0.0])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--sweep", nargs="+", choices=KERNELS, default=[])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    device = torch.device("cuda")
    axes = (options.tokens, options.shapes, options.adapters, options.dropout)
    points = [Point(s, t, a, p) for t, s, a, p in itertools.product(*axes)]
    if options.sweep:
        precompile(points, options.sweep, max(1, min(14, (os.cpu_count() or 2) - 2)))
        print(f"compiled; {deadline - time.monotonic():.0f} s left")
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)}: a copy moves {bandwidth / 1e12:.2f} TB/s")
    results: list[Result] = []
    for point in points:
        if time.monotonic() > deadline:
            print(f"out of time before {point}")
            break
        case = Case(point, device)
        for kernel in options.sweep:
            results += sweep(case, point, kernel, bandwidth, deadline)
        if not options.sweep:
            results += measure(case, point, options.kernels, bandwidth)
    (show_best if options.sweep else show)(results)
    if options.csv:
        write_rows(options.csv, [r.cells() for r in results])


if __name__ == "__main__":
    main()
