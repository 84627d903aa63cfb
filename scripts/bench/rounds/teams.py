"""Context parallelism by micro-batch against context parallelism throughout, simulated.

    python -m scripts.bench.rounds.teams --csv scripts/bench/results/rounds.csv

An 8B model on one replica of 2 or 8 GPUs, twelve jobs, rounds by time of every depth: packed and
shared out by the run's own code, timed by the planner's speeds of 1, 2, 4 and 8 ranks together.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.rows import append_rows
from scripts.bench.planner.cases import model_spec
from scripts.bench.rounds.__main__ import DOCUMENT_ROWS, DOCUMENT_SHARE
from scripts.bench.rounds.mixes import BATCH, LONGEST, Lengths, batches, lognormals, with_documents
from scripts.bench.rounds.simulate import sequence_of
from tlora_megatron.model.cp_dispatch import CpRates
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.replica_rate import replica_rate
from tlora_megatron.planner.hardware import load_profile
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.training.packing.packing import Item, Round, batch_items
from tlora_megatron.training.packing.recompute_cut import (
    RoundRule,
    fill_by_time,
    form_teams,
    rank_ends_ps,
    round_ends_ps,
)

DEPTHS = (1, 2, 4)
GPUS = ("h200", "h100", "l40s")
MODES = ("cp", "cp by micro-batch")
_ROUNDS = 32


def rates_of(mix: Lengths, cp_size: int, budget: int, gpu: str) -> CpRates:
    """The planner's speeds of 1, 2, 4, ... ranks of a replica."""
    loads = [
        JobLoad(name=name, rank=16, batch_size=64, lengths=LengthHistogram.from_lengths(lengths))
        for name, lengths in mix.items()
    ]
    profile = load_profile(REPO / "configs" / "hardware" / f"{gpu}.json")
    sizes = [1 << power for power in range(cp_size.bit_length())]
    plan = Plan(recompute="none", micro_batch_tokens=budget)
    plans = [
        replace(plan, cp_size=size, micro_batch_tokens=budget * size // cp_size) for size in sizes
    ]
    return CpRates(tuple(replica_rate(model_spec("8b"), loads, own, profile) for own in plans))


def rounds_of(mix: Lengths, rates: CpRates, depth: int) -> Iterator[Round]:
    """Rounds of one replica, filled by time."""
    jobs = [batches(lengths, seed) for seed, lengths in enumerate(mix.values())]
    rule = RoundRule(rates=(rates.of(rates.cp_size),), depth=depth, stages=(1,))
    queues: list[list[Item]] = [[] for _ in jobs]
    begun = [0] * len(jobs)
    for number in range(_ROUNDS):
        for slot, batch in enumerate(jobs):
            if not queues[slot]:
                queues[slot] = batch_items([sequence_of(n) for n in batch(begun[slot])])
                begun[slot] += 1
        filled, queues = fill_by_time(queues, rule, first_slot=number)
        yield filled


class Result(NamedTuple):
    """The time of all rounds of a mix."""

    step_s: float
    """Seconds for the work of one global batch of every job."""
    busy_share: float


def compare(mix: Lengths, rates: CpRates, depth: int) -> dict[str, Result]:
    """Runs the same rounds in both modes."""
    alone = rates.of(1).sequence_ps
    step_ps = sum(BATCH * sum(map(alone, own)) / len(own) for own in mix.values())
    work_ps, times, busy = 0, [0, 0], [0, 0]
    for filled in rounds_of(mix, rates, depth):
        work_ps += sum(alone(p.item.length) for own in filled.micro_batches for p in own)
        together = round_ends_ps(filled, [rates.of(rates.cp_size)]) * rates.cp_size
        apart = rank_ends_ps(form_teams(filled, rates), rates)
        for mode, ends in enumerate((together, apart)):
            times[mode] += max(ends)
            busy[mode] += sum(ends)
    return {
        name: Result(
            step_s=times[mode] * 1e-12 * step_ps / work_ps,
            busy_share=busy[mode] / times[mode] / rates.cp_size,
        )
        for mode, name in enumerate(MODES)
    }


def main() -> int:
    """Prints and writes a row for each GPU, mix, number of ranks, depth and mode."""
    args = bench_parser(__doc__).parse_args()
    tail = with_documents(DOCUMENT_SHARE, DOCUMENT_ROWS)
    mixes = {
        "lognormals": (lognormals(), LONGEST),
        "lognormals, 0.2 % of 65536": (tail, DOCUMENT_ROWS),
    }
    rows = []
    for gpu, (name, (mix, budget)), cp_size in itertools.product(GPUS, mixes.items(), (2, 8)):
        rates = rates_of(mix, cp_size, budget, gpu)
        for depth in DEPTHS:
            for mode, found in compare(mix, rates, depth).items():
                row = {
                    "gpu": f"simulated {gpu.upper()}",
                    "world": cp_size,
                    "commit": args.commit,
                    "lengths": name,
                    "layout": f"8b CP{cp_size}, {budget} tokens, recompute none",
                    "mode": f"{mode}, time {depth}",
                    "step_s": round(found.step_s, 4),
                    "busy_share": round(found.busy_share, 4),
                    "predicted_s": round(found.step_s, 4),
                }
                print(row, flush=True)
                rows.append(row)
    if args.csv:
        append_rows(args.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
