"""Finds what makes a row's bits depend on anything but the row, its document and its job.

    python -m scripts.bench.determinism.leaks
    python -m scripts.bench.determinism.leaks --only attention --repeats 20
    python -m scripts.bench.determinism.leaks --default     # the fastest kernels: what leaks there

Runs every operation of a layer, of the head and of the optimizer on the same own rows: again, at
other places, beside neighbours (ranks, dropout, NaN, many documents, long ones), in fuller and
emptier micro-batches. The table says `equal`, or names the first context and the share of elements
that differ. Returns 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from scripts.bench.determinism.contexts import ALONE, Context, contexts
from scripts.bench.determinism.operations import Run, Shapes, operations
from scripts.bench.harness.rows import gpu_name, versions
from tlora_megatron.ops.exactness import Exactness

KINDS = ("again", "place", "neighbours", "fill")
Tensors = dict[str, torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    args = arguments(argv)
    shapes = Shapes.here()
    sized = Exactness(short_document=shapes.unit, long_document=2 * shapes.unit)
    exactness = None if args.default else sized
    print(f"{gpu_name()}, {versions()}, {'default' if args.default else exactness}")
    begin = time.perf_counter()
    print("| op | " + " | ".join(KINDS) + " |")
    print("|---" * (1 + len(KINDS)) + "|")
    differs = False
    for name, run in operations(shapes).items():
        if args.only and not any(word in name for word in args.only):
            continue
        found = search(run, exactness, shapes.unit, args.repeats)
        differs = differs or any(found.values())
        cells = [found[kind] or "equal" for kind in KINDS]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(f"{'DIFF' if differs else 'all equal'}, {time.perf_counter() - begin:.0f} s")
    return int(differs)


def search(run: Run, exactness: Exactness | None, unit: int, repeats: int) -> dict[str, str]:
    """Returns what differs first in each column of the table; empty where all is equal."""
    found = dict.fromkeys(KINDS, "")
    expected = run(ALONE, exactness)
    tried: list[Context] = [ALONE] * repeats
    for context in (*tried, *contexts(unit)):
        if not found[context.kind]:
            found[context.kind] = difference(context.name, expected, run(context, exactness))
    return found


def difference(where: str, expected: Tensors, found: Tensors) -> str:
    """Names the tensors whose bits differ, and how many elements; empty where none does."""
    parts = [
        f"{name} {100 * unequal(value, found[name]):.2g} %"
        for name, value in expected.items()
        if unequal(value, found[name])
    ]
    return f"DIFF {where}: {', '.join(parts)}" if parts else ""


def unequal(one: torch.Tensor, other: torch.Tensor) -> float:
    """Share of elements whose bytes differ."""
    size = one.element_size()
    pair = (x.contiguous().flatten().view(torch.uint8).view(-1, size) for x in (one, other))
    a, b = pair
    return float((a != b).any(dim=1).double().mean())


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="words that a chosen operation's name has one of")
    parser.add_argument("--repeats", type=int, default=8, help="of the same call")
    parser.add_argument("--default", action="store_true", help="without exactness")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
