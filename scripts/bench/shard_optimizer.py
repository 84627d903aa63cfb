"""Times and weighs rounds whose replicas divide optimizer states, beside whole states.

    torchrun --standalone --nproc-per-node 2 -m scripts.bench.shard_optimizer --csv rows.csv

The super-model is built once, on random weights. Whole and sharded optimizer states
(`parallel.shard_optimizer`) take turns on it: the same jobs with the same values and data, a few
rounds to warm up, then timed ones. A row has the mode's median round, the bytes allocated on its
fullest GPU between rounds and at their peak, and what the planner predicts. Before rows are
written, the losses of both modes must be those of the first turn: to the bit over gloo, and within
1e-2 on GPUs, whose attention adds in any order. The bits of the steps themselves are tested in
`tests/gpu`.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.clock import allocated, is_main, largest, peak_bytes, say, wait_for_all
from scripts.bench.harness.rows import append_rows, gpu_name, versions
from scripts.bench.planner.cases import Case, parse_case, predict
from tlora_megatron.planner.hardware import HardwareProfile, load_profile
from tlora_megatron.profiling.synthetic_run import SyntheticRun

MODES = {"whole": False, "sharded": True}
_TOLERANCE = 1e-2


class Turn(NamedTuple):
    """The outcome of one mode in one turn."""

    round_s: list[float]
    losses: list[float]
    rest_bytes: float
    peak_bytes: float


def take_turn(run: SyntheticRun, case: Case, mode: str, warm: int, rounds: int) -> Turn:
    """Gives the base new jobs, all with the same values in every turn, and trains them."""
    torch.manual_seed(0)
    model = run.super_model(case.jobs, case.plan.micro_batch_tokens, shard_optimizer=MODES[mode])
    losses: list[float] = []
    for _ in range(warm):
        losses += [report.outcome.loss for report in model.train_round()]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    rest, times = allocated(), list[float]()
    for _ in range(rounds):
        wait_for_all()
        begin_s = time.perf_counter()
        losses += [report.outcome.loss for report in model.train_round()]
        wait_for_all()
        times.append(time.perf_counter() - begin_s)
    rest_bytes, peak = largest([float(rest), float(peak_bytes())])
    return Turn(times, losses, rest_bytes, peak)


def check_losses(found: Sequence[float], expected: Sequence[float], mode: str) -> None:
    """Refuses a mode whose jobs come to other losses.

    Raises:
        SystemExit: naming it.
    """
    pairs = list(zip(found, expected, strict=True))
    assert pairs, "some job must step"
    exact = not torch.cuda.is_available()
    is_same = (
        found == expected if exact else all(math.isclose(*p, rel_tol=_TOLERANCE) for p in pairs)
    )
    if not is_same:
        raise SystemExit(f"losses of {mode} states must be those of the first turn, got {pairs}")


def row_of(
    case: Case, mode: str, turns: Sequence[Turn], hardware: HardwareProfile, commit: str
) -> dict[str, Any]:
    """The row of a mode."""
    times = [seconds for turn in turns for seconds in turn.round_s]
    cost, memory = predict(
        replace(case, plan=replace(case.plan, shard_optimizer=MODES[mode])), hardware
    )
    return {
        "gpu": gpu_name(), "versions": versions("megatron-core"), "commit": commit,
        "gpus": dist.get_world_size(), "case": case.name, "mode": mode, "rounds": len(times),
        "round_s": round(statistics.median(times), 5), "predicted_s": round(cost.step_time_s, 5),
        "rest_bytes": round(max(turn.rest_bytes for turn in turns)),
        "peak_bytes": round(max(turn.peak_bytes for turn in turns)),
        "predicted_bytes": round(memory.allocated_bytes),
    }  # fmt: skip


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs one case in turns."""
    case = parse_case(args.case, int(os.environ.get("WORLD_SIZE", "1")))
    on_gpu = torch.cuda.is_available()
    run = SyntheticRun(
        case.spec,
        case.plan.layout,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        recompute=case.plan.recompute,
        quantisation=case.quantisation,
    )
    turns: dict[str, list[Turn]] = {mode: [] for mode in MODES}
    first: Turn | None = None
    for number in range(args.turns):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            turn = take_turn(run, case, mode, args.warm_rounds, args.rounds)
            first = first or turn
            check_losses(turn.losses, first.losses, mode)
            turns[mode].append(turn)
            say(f"{mode}: {statistics.median(turn.round_s) * 1e3:.1f} ms, peak "
                f"{turn.peak_bytes / 2**30:.2f} GiB")  # fmt: skip
    hardware = load_profile(args.hardware)
    return [row_of(case, mode, turns[mode], hardware, args.commit) for mode in MODES]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and appends the rows."""
    parser = bench_parser(__doc__)
    parser.add_argument("--case", default="8b/32 tp1 pp1 none 8j 8192t", help="as `planner` names")
    parser.add_argument("--hardware", type=Path, default=Path("configs/hardware/h200.json"))
    parser.add_argument("--turns", type=int, default=4, help="of each mode")
    parser.add_argument("--warm-rounds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help="timed, in each turn")
    args = parser.parse_args(argv)
    rows = bench(args)
    if is_main():
        whole, sharded = rows
        ratio = sharded["round_s"] / whole["round_s"]
        saved = (whole["peak_bytes"] - sharded["peak_bytes"]) / 2**30
        expected = (whole["predicted_bytes"] - sharded["predicted_bytes"]) / 2**30
        print(f"sharded over whole: {ratio:.3f} of the time, {saved:.2f} GiB less at the peak")
        print(f"predicted: {sharded['predicted_s'] / whole['predicted_s']:.3f}, {expected:.2f} GiB")
        if args.csv:
            append_rows(args.csv, rows)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
