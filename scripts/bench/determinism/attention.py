"""Times the exact backward pass of attention beside the fastest one, and checks its bits.

    python -m scripts.bench.determinism.attention --csv rows.csv
    python -m scripts.bench.determinism.attention --only "1 x 8192" --heads "32/8" --rounds 30

At the heads of Llama-3.1-8B, and of a rank of two, for several mixes of documents: the forward pass
runs once, then backward passes alone in all variants, in turns. A variant that is not exact gets no
time: each document's gradients must have the bits that it has alone, twice, with all memory full of
NaN, and be as near to fp32 as those by default. `ms` is the device's time, with the host ahead;
`host_ms` is what the host takes to launch it. Returns 1 if anything differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.bench.determinism.attention_variants import DEFAULT, VARIANTS, Backward, Variant
from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.clock import wait_for_device
from scripts.bench.harness.rows import append_rows, gpu_name, versions
from tlora_megatron.ops.frozen.exact_attention import run_beside_each_other
from tlora_megatron.ops.frozen.packed_attention import attend_spans
from tlora_megatron.ops.routing import Document, pack_micro_batch

HEADS = {"32/8": (32, 8), "16/4": (16, 4)}
HEAD_DIM = 128
MIXES: dict[str, tuple[int, ...]] = {
    "32 x 256": (256,) * 32,
    "8 x 1024": (1024,) * 8,
    "4 x 1024": (1024,) * 4,
    "9 of 148 to 1800": (300, 1700, 900, 148, 1800, 248, 1048, 1048, 1000),
    "4 x 2048": (2048,) * 4,
    "2 x 4096": (4096,) * 2,
    "1 x 8192": (8192,),
    "6000 and short": (300, 6000, 492, 900, 400),
    "all classes": (700, 1500, 1100, 348, 2500, 1844),
    "1 x 16384": (16384,),
}
"""`4 x 1024` is a nano-batch; `6000 and short` and `all classes` end with padding."""
ROWS = 1024
"""Micro-batches have a multiple of it."""
SMALL = (300, 1700, 900, 2500)
"""Documents that fp32 computes too."""
SLEEP_CYCLES = 6_000_000
"""About 3 ms on an H200, so that the host has launched all when the device begins."""
POISON_BYTES = 3 << 30


class Measured(NamedTuple):
    """One variant's times over the rounds."""

    calls: int
    ms: float
    host_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    args = arguments(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    variants = [v for v in VARIANTS if not args.variants or v.name in args.variants]
    begin, wrong = time.perf_counter(), 0
    print(f"{gpu_name()}, {versions()}")
    for name in args.heads:
        wrong += not is_near_fp32(variants, HEADS[name], device)
        header = ["heads", "documents", *(variant.name for variant in variants)]
        print("\n| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
        for title in args.only or MIXES:
            cells = measure(name, title, variants, device, args)
            wrong += sum(cell is None for cell in cells)
            print(f"| {name} | {title} | " + " | ".join(_said(cells)) + " |", flush=True)
    print(f"{wrong} wrong, {time.perf_counter() - begin:.0f} s")
    return int(wrong > 0)


def measure(
    heads: str,
    title: str,
    variants: Sequence[Variant],
    device: torch.device,
    args: argparse.Namespace,
) -> list[Measured | None]:
    """Checks and times all variants on one mix and writes rows; None where one is not exact."""
    documents = tuple(max(2, length // args.shrink) for length in MIXES[title])
    rows = -(-sum(documents) // ROWS) * ROWS
    inputs, dout = draw(rows, HEADS[heads], device, sum(documents))
    ready = [variant.prepare(inputs, documents) for variant in variants]
    exact = [
        variant is DEFAULT or is_exact(variant, backward, inputs, dout, documents)
        for variant, (backward, _) in zip(variants, ready, strict=True)
    ]
    times = timed([backward for backward, _ in ready], dout, args)
    cells = [
        Measured(calls, *found) if right else None
        for right, (_, calls), found in zip(exact, ready, times, strict=True)
    ]
    _write(args, heads, title, variants, cells)
    return cells


def draw(
    rows: int, heads: tuple[int, int], device: torch.device, used: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns q, k, v and the output's gradient, which is 0 behind the last document."""
    generator = torch.Generator(device).manual_seed(rows + heads[0])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def randn(count: int) -> Tensor:
        shape = (rows, count, HEAD_DIM)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    dout = randn(heads[0])
    dout[used:] = 0
    return (randn(heads[0]), randn(heads[1]), randn(heads[1])), dout


def is_exact(
    variant: Variant,
    backward: Backward,
    inputs: Sequence[Tensor],
    dout: Tensor,
    documents: Sequence[int],
) -> bool:
    """Compares each document's gradients with those it has alone, and padding's with 0."""
    torch.cuda.empty_cache()
    poison(dout.device)
    found, again = backward(dout), backward(dout)
    same = [torch.equal(a, b) for a, b in zip(found, again, strict=True)]
    begin = 0
    for length in documents:
        rows = slice(begin, begin + length)
        own = [x[rows].clone() for x in inputs]
        alone, _ = variant.prepare(own, (length,))
        poison(dout.device)
        expected = alone(dout[rows].clone())
        same += [torch.equal(a[rows], b) for a, b in zip(found, expected, strict=True)]
        begin += length
    same += [not a[begin:].any() for a in found]
    if not all(same):
        print(f"{variant.name}: {same.count(False)} of {len(same)} comparisons DIFFER")
    return all(same)


def is_near_fp32(variants: Sequence[Variant], heads: tuple[int, int], device: torch.device) -> bool:
    """Holds every variant's error to that of the default one."""
    rows = sum(SMALL)
    inputs, dout = draw(rows, heads, device, rows)
    view = pack_micro_batch(
        [Document(slot=0, length=n) for n in SMALL], num_slots=1, num_tokens=rows
    )
    leaves = [x.float().requires_grad_() for x in inputs]
    out = attend_spans(*leaves, view, HEAD_DIM**-0.5)
    expected = torch.autograd.grad(out, leaves, dout.float())
    limits, right = None, True
    for variant in (DEFAULT, *variants):
        grads = variant.prepare(inputs, SMALL)[0](dout)
        errors = [
            ((a.float() - b).norm() / b.norm()).item() for a, b in zip(grads, expected, strict=True)
        ]
        limits = limits or [1.05 * error + 1e-6 for error in errors]
        if any(error > limit for error, limit in zip(errors, limits, strict=True)):
            right = False
            print(f"{variant.name}: errors of dq, dk, dv {errors}, DIFFER from fp32")
    return right


def poison(device: torch.device) -> None:
    """Fills memory that the next calls get with NaN, on the streams that they run on."""
    if device.type != "cuda":
        return

    def fill() -> None:
        torch.full((POISON_BYTES // 16,), torch.nan, device=device)

    run_beside_each_other([fill] * 4, device, 4)
    wait_for_device()


def timed(
    backwards: Sequence[Backward], dout: Tensor, args: argparse.Namespace
) -> list[tuple[float, float]]:
    """Milliseconds of the device and of the host, medians of turns."""
    found: list[list[tuple[float, float]]] = [[] for _ in backwards]
    for turn in range(args.warmup + args.rounds):
        for backward, times in zip(backwards, found, strict=True):
            once = _one_turn(backward, dout)
            if turn >= args.warmup:
                times.append(once)
    return [
        (statistics.median(ms for ms, _ in times), statistics.median(host for _, host in times))
        for times in found
    ]


def _one_turn(backward: Backward, dout: Tensor) -> tuple[float, float]:
    if not dout.is_cuda:
        begin = time.perf_counter()
        backward(dout)
        ms = (time.perf_counter() - begin) * 1e3
        return ms, ms
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(SLEEP_CYCLES)
    events[0].record()
    begin = time.perf_counter()
    backward(dout)
    host_ms = (time.perf_counter() - begin) * 1e3
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]), host_ms


def _said(cells: Sequence[Measured | None]) -> list[str]:
    """Cells of the table: milliseconds of the device, of the host, and calls."""
    return [
        f"{cell.ms:.2f} ({cell.calls}, {cell.host_ms:.2f})" if cell else "DIFFERS" for cell in cells
    ]


def _write(
    args: argparse.Namespace,
    heads: str,
    title: str,
    variants: Sequence[Variant],
    cells: Sequence[Measured | None],
) -> None:
    if not args.csv:
        return
    rows = [
        {
            "gpu": gpu_name(),
            "versions": versions(),
            "commit": args.commit,
            "heads": heads,
            "documents": title,
            "variant": variant.name,
            "calls": cell.calls,
            "ms": round(cell.ms, 3),
            "host_ms": round(cell.host_ms, 3),
        }
        for variant, cell in zip(variants, cells, strict=True)
        if cell
    ]
    append_rows(args.csv, rows)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--heads", nargs="+", choices=HEADS, default=list(HEADS), help="query and key heads")
    add("--only", nargs="+", choices=MIXES, help="mixes of documents")
    add("--variants", nargs="+", choices=[v.name for v in VARIANTS], help="default: all")
    add("--rounds", type=int, default=10, help="timed of each variant")
    add("--warmup", type=int, default=2)
    add("--shrink", type=int, default=1, help="documents so many times shorter, to try it out")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
