"""Times one multi-adapter linear, forward and backward, against the frozen linear beside it.

    python -m scripts.bench.linear --providers baselines --tokens 8192 --dropout 0 --csv rows.csv

Shapes are those of Llama-3.1-8B and of a rank of 70B at TP 4. A provider is `tlora` (the kernels
chosen for this GPU), `tlora_torch`, `tlora_triton` or `tlora_cuda` (forced), `frozen`, `tlora_fp8`,
`tlora_fp8_given` and `frozen_fp8` (over an FP8 base), or a baseline of `linear/baselines.py`. What
the captured graph computes is checked against fp32 first (an FP8 base: against its definition); a
wrong cell is reported and not written. Frozen and provider then run in turn as CUDA graphs over
rotated buffers, so that both see the same clock; times are medians.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from scripts.bench.harness.arguments import bench_parser
from scripts.bench.linear.baselines import BASELINES, why_not
from scripts.bench.linear.fused import FP8
from scripts.bench.linear.measure import AdapterSets, CellMeasurer, versions
from scripts.bench.linear.results import Row, append_csv, cell_of, read_csv, summary, summary_table
from scripts.bench.linear.workload import MEASURED, SHAPES, adapter_mix, make_workload

T = TypeVar("T", int, float)
TLORA = ("tlora", "tlora_torch", "tlora_triton", "tlora_cuda")
PROVIDERS = ("frozen", *TLORA, *FP8, *BASELINES)
TOKENS = (8192, 16384, 2048)
"""Most important first: that is what a run cut short has."""
ADAPTERS = (4, 16, 1, 64)
DROPOUT = (0.0, 0.1)


def run(args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Measures every cell that there is time for; returns rows, and cells without one."""
    deadline = time.monotonic() + args.budget_s
    rows: list[Row] = []
    problems: list[str] = []
    for tokens, shape in itertools.product(args.tokens, args.shapes):
        if time.monotonic() > deadline:
            problems.append(f"{shape} {tokens}: no time left")
            continue
        for row in _measured(args, tokens, shape, deadline, problems):
            rows.append(row)
            print(_line(row), flush=True)
            if args.csv is not None:
                append_csv(args.csv, row)
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows, problems


def _measured(
    args: argparse.Namespace, tokens: int, shape: str, deadline: float, problems: list[str]
) -> Iterator[Row]:
    """All cells of one shape and token count, on the same operands."""
    workload = make_workload(SHAPES[shape], tokens, device=args.device, dtype=args.dtype)
    measurer = CellMeasurer(workload, args.versions, rounds=args.rounds)
    for adapters in args.adapters:
        sets = AdapterSets(workload, adapter_mix(tokens, adapters))
        for dropout, provider in itertools.product(args.dropout, args.providers):
            cell = f"{shape} {tokens} x{adapters} p={dropout:g} {provider}"
            if provider in BASELINES and why_not(provider, sets.mix, dropout):
                continue
            if time.monotonic() > deadline:
                problems.append(f"{cell}: no time left")
                continue
            row, problem = measurer.measure(provider, sets, dropout)
            if row is not None:
                yield row
            if problem:
                print(f"{cell}: {problem}", flush=True)
                problems.append(f"{cell}: {problem}")


def _line(row: Row) -> str:
    return (
        f"{cell_of(row):44} {row['fwd_us']:9.1f} {row['bwd_us']:9.1f} us  frozen "
        f"{row['frozen_fwd_us']:9.1f} {row['frozen_bwd_us']:9.1f}  ratio {row['ratio']:.3f}  error "
        f"{row['rel_error']:.1e}  spread {row['spread']:.1%} / {row['frozen_spread']:.1%}"
    )


def report(rows: Sequence[Row], problems: Sequence[str], most: int = 20) -> None:
    print("\nratio to the frozen linear, forward + backward: geometric mean over shapes")
    print("(* = over fewer shapes)")
    print(summary_table(summary(rows)))
    for problem in problems[:most]:
        print("not measured:", problem)
    if len(problems) > most:
        print(f"not measured: and {len(problems) - most} more")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a cell failed or was wrong."""
    args = arguments(argv)
    if args.report:
        report(read_csv(args.report), [])
        return 0
    rows, problems = run(args)
    report(rows, problems)
    return int(any("no time left" not in problem for problem in problems))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--shapes", type=names_of(SHAPES), default=MEASURED)
    parser.add_argument("--tokens", type=numbers(int), default=TOKENS)
    parser.add_argument("--adapters", type=numbers(int), default=ADAPTERS)
    parser.add_argument("--dropout", type=numbers(float), default=DROPOUT)
    parser.add_argument(
        "--providers",
        type=names_of(PROVIDERS, baselines=tuple(BASELINES), fp8=FP8),
        default=("tlora",),
        help=f"of {', '.join(PROVIDERS)}; `baselines` and `fp8` are all of those",
    )
    parser.add_argument("--budget-s", type=float, default=540.0, help="start no cell after this")
    parser.add_argument("--rounds", type=int, default=20, help="graph replays of a cell")
    parser.add_argument("--quick", action="store_true", help="8192 tokens, 4 adapters, no dropout")
    parser.add_argument("--report", type=Path, nargs="+", help="measure nothing: tables of CSVs")
    parser.add_argument("--device", type=torch.device, default=None)
    args = parser.parse_args(argv)
    if args.quick:
        args.tokens, args.adapters, args.dropout = (8192,), (4,), (0.0,)
    if args.device is None:
        args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = torch.bfloat16
    args.versions = versions(args.device, args.commit)
    return args


def names_of(known: Collection[str], **groups: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names, with names for groups of them."""

    def parse(text: str) -> tuple[str, ...]:
        names = [n for name in text.split(",") for n in groups.get(name, (name,))]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {name}")
        return tuple(dict.fromkeys(names))

    return parse


def numbers(kind: type[T]) -> Callable[[str], tuple[T, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
