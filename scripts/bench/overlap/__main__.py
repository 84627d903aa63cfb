"""Times a decoder whose tensor-parallel communication is hidden behind nano-batches.

Forward and backward of a few layers with adapters. `none` is the micro-batch whole, with Megatron's
own collectives; `skipped` leaves them out; what lies between is the exposed communication, of which
`hidden_share` is hidden. Mechanisms carry the communication of several nano-batches. `frozen` has
no adapters. Domino's splitting (two halves of a batch, asynchronous NCCL) is `nccl` with 2.

A variant whose input gradient is further from fp32's than `none`'s (by half) is not timed. Variants
take turns round by round; a time is the median over rounds of the slowest process. `cpu_ms` is how
long the host takes to start a step. The controller then chooses a number by steps of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from scripts.bench.harness.arguments import RESULTS, bench_parser
from scripts.bench.harness.clock import out_of_time, say
from scripts.bench.harness.rows import append_rows
from scripts.bench.overlap.case_run import CaseRun
from scripts.bench.overlap.cases import FROZEN, FROZEN_SKIPPED, NONE, SKIPPED, Bench, Case, Variant
from tlora_megatron.integrations.megatron.model import initialize_parallel
from tlora_megatron.model.layout import ParallelLayout

CASES = tuple(
    f"{model}:{shape}:{adapters}"
    for adapters in (4, 16)
    for shape in ("8x1024", "8x2048", "16x1024")
    for model in ("70b", "8b")
)
"""The most telling first: a budget may not reach the last."""
COUNTS = (2, 3, 4)
CONTROLLER_STEPS = 60


def variants(args: argparse.Namespace) -> list[Variant]:
    """The ways that are asked for, the references first."""
    found = [NONE, SKIPPED] if args.brief else [NONE, SKIPPED, FROZEN, FROZEN_SKIPPED]
    if args.one_queue:
        return found
    found += [Variant(m, n) for m in args.mechanisms for n in args.counts]
    if args.brief:
        return found
    return [*found, *(Variant("skipped", n) for n in args.counts[:1])]


def main() -> int:
    """Runs the cases that the budget reaches; rows are written as each ends."""
    begin = time.monotonic()
    args = arguments()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    layout = ParallelLayout.for_world(
        world, tp_size=world, pp_size=1, cp_size=1, sequence_parallel=args.sequence_parallel
    )
    initialize_parallel(layout, overlaps=not args.one_queue)
    say(f"process groups after {time.monotonic() - begin:.1f} s")
    benches: dict[str, Bench] = {}
    for case in map(Case.parse, args.cases):
        if out_of_time(begin, args.budget_s):
            say(f"{case.label}: left out, the budget is spent")
            continue
        if case.model in benches:
            benches[case.model].set_case(case)
        else:
            dtype = getattr(torch, args.dtype)
            benches[case.model] = Bench(case, layout, dtype, args.layers)
        say(f"{case.label}: built after {time.monotonic() - begin:.1f} s in all")
        for row in CaseRun(benches[case.model], variants(args), args).run():
            if dist.get_rank() == 0:
                append_rows(args.csv, [row])
            shown = ("mechanism", "nano_batches", "step_ms", "cpu_ms", "hidden_share")
            say(f"{case.label} " + " ".join(f"{name} {row[name]}" for name in shown))
    dist.destroy_process_group()
    return 0


def arguments() -> argparse.Namespace:
    """The command line; on a machine without GPUs its defaults are a small trial over gloo."""
    is_cuda = torch.cuda.is_available()
    words: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser = bench_parser(__doc__, csv=RESULTS / "tp_overlap.csv")
    parser.add_argument("--cases", type=words, default=list(CASES) if is_cuda else ["tiny:4x32:2"])
    parser.add_argument(
        "--mechanisms", type=words, default=["nccl", "copy_engine"] if is_cuda else ["gloo"]
    )
    parser.add_argument(
        "--counts", type=lambda text: [int(n) for n in text.split(",")], default=list(COUNTS)
    )
    parser.add_argument(
        "--brief", action="store_true", help="--mechanisms and what they are held against"
    )
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--layers", type=int, help="8 of 70B, 16 of 8B if not given")
    parser.add_argument("--rounds", type=int, default=9 if is_cuda else 3)
    parser.add_argument(
        "--case-s", type=float, default=8.0, help="fewer rounds, but 5, once timing takes as long"
    )
    parser.add_argument("--controller-steps", type=int, default=CONTROLLER_STEPS)
    parser.add_argument("--no-controller", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="of gradients, half the time")
    parser.add_argument("--one-queue", action="store_true")
    parser.add_argument("--budget-s", type=float, default=500.0, help="no case begins after it")
    parser.add_argument("--dtype", default="bfloat16" if is_cuda else "float32")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
