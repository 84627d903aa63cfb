"""Rounds by time against rounds by tokens: simulated, or measured on the GPUs at hand.

    python -m scripts.bench.rounds --lengths PATH --csv scripts/bench/results/rounds.csv
    torchrun --standalone --nproc-per-node 2 -m scripts.bench.rounds --measure --csv rounds.csv

A simulation packs with the run's own packer and times with the planner's speed of a replica of an
8B model on an H200. Every mode trains about twelve global batches of every job. The public lengths
are left out where their file is not named or missing.

`--measure` trains random weights at the shapes of an 8B model (`--layers` of its 32) with full
recompute and a budget of 65,536 rows; 0.2 % of the sequences are documents of 65,536. Each mode
trains the same three batches of every job, on adapters of its own. Each round's time, with a wait
on both sides, is held against the prediction. It says whether the musts are met: 15 % less time,
and a median error of 5 % of the predicted rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.rows import append_rows
from scripts.bench.planner.cases import model_spec
from scripts.bench.rounds.mixes import LONGEST, Lengths, lognormals, public, with_documents
from scripts.bench.rounds.simulate import DEPTHS, simulate
from tlora_megatron.config.schema import Recompute
from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.replica_rate import replica_rate
from tlora_megatron.planner.hardware import load_profile
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

DOCUMENT_ROWS, DOCUMENT_SHARE = 65536, 0.002
PROFILE = REPO / "configs" / "hardware" / "h200.json"
WORLDS = (2, 8, 32)


def rate_of(
    mix: Lengths,
    budget: int,
    recompute: Recompute,
    *,
    model: str = "8b",
    layers: int = 32,
    profile: Path = PROFILE,
) -> ReplicaRate:
    """The planner's speed of one GPU for a model and the jobs of a mix."""
    loads = [
        JobLoad(name=name, rank=16, batch_size=64, lengths=LengthHistogram.from_lengths(lengths))
        for name, lengths in mix.items()
    ]
    plan = Plan(micro_batch_tokens=budget, recompute=recompute)
    spec = replace(model_spec(model), num_layers=layers)
    return replica_rate(spec, loads, plan, load_profile(profile))


def mixes(path: Path | None) -> Iterator[tuple[str, Lengths, int, Recompute]]:
    """Name, lengths, budget and recompute of each mix."""
    yield "lognormals", lognormals(), LONGEST, "none"
    tail = with_documents(DOCUMENT_SHARE, DOCUMENT_ROWS)
    yield "lognormals, 0.2 % of 65536", tail, DOCUMENT_ROWS, "full"
    if path is not None and path.is_file():
        yield "public", public(path), 9216, "none"
    else:
        print("public lengths are left out: --lengths names no file", file=sys.stderr)


def run_simulation(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every mix, number of replicas and mode."""
    rows = []
    for name, mix, budget, recompute in mixes(args.lengths):
        rate = rate_of(mix, budget, recompute)
        for world in args.worlds:
            results = {mode: simulate(mix, [rate] * world, mode) for mode in DEPTHS}
            first = results["tokens"]
            for mode, found in results.items():
                gain = 1 - found.step_s / first.step_s
                slower = first.smallest_steps_per_s / found.smallest_steps_per_s - 1
                print(
                    f"{name}, {world} replicas, {mode:6} (depth {found.depth}): "
                    f"{found.step_s:7.2f} s, {found.busy_share:5.1%} busy, {gain:5.1%} saved; "
                    f"the smallest job's steps take {slower:+.0%}", flush=True,
                )  # fmt: skip
                rows.append(
                    row_of("simulated H200", world, args.commit, name, budget, recompute, mode)
                    | {
                        "step_s": round(found.step_s, 4),
                        "busy_share": round(found.busy_share, 4),
                        "predicted_s": round(found.step_s, 4),
                    }
                )
    return rows


def row_of(
    gpu: str, world: int, commit: str, lengths: str, budget: int, recompute: str, mode: str
) -> dict[str, Any]:
    """The columns that say what a row is of."""
    return {
        "gpu": gpu,
        "world": world,
        "commit": commit,
        "lengths": lengths,
        "layout": f"8b DP{world}, {budget} tokens, recompute {recompute}",
        "mode": mode,
    }


def main() -> int:
    """Simulates, or measures in the world that torchrun started; 1 = a must was missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--lengths", type=Path, help="CSV (gzip) with lengths of public sets")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="simulated replicas")
    parser.add_argument("--measure", action="store_true", help="train on the GPUs at hand")
    parser.add_argument("--layers", type=int, default=8, help="of the measured model")
    parser.add_argument("--steps", type=int, default=3, help="measured batches of every job")
    parser.add_argument("--modes", nargs="+", default=("tokens", "time 4"), choices=DEPTHS)
    parser.add_argument("--hardware", type=Path, default=PROFILE, help="profile of the GPU")
    parser.add_argument("--model", default="8b", help="shape; tiny for a test on a CPU")
    parser.add_argument("--share", type=float, default=DOCUMENT_SHARE, help="of documents")
    parser.add_argument("--budget", type=int, default=DOCUMENT_ROWS, help="measured budget of rows")
    args = parser.parse_args()
    if args.measure:
        from scripts.bench.rounds.measure import measure

        return measure(args, rate_of)
    rows = run_simulation(args)
    if args.csv:
        append_rows(args.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
