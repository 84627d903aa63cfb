"""The planner's step time and peak memory against the super-model's, on the GPUs at hand.

    python -m scripts.bench.planner --report scripts/bench/results/plan_vs_measured.csv

Every case builds the super-model on random weights under its layout, inside one torchrun, and runs
whole rounds. The planner knows the jobs' lengths as histograms and predicts the mean round. Those
rounds are timed whose tokens and padded rows are most like the mean of the first hundreds, which
are packed without a model; the rounds before are packed and not run.

The world size decides which cases run, unless `--cases` does: `MODEL/LAYERS tpN ppN [cpN] RECOMPUTE
JOBSj TOKENSt`, what is left of the world is data parallel. MODEL-fp8 has an FP8 base. `--nodes 2`
has NCCL treat the GPUs of one machine as those of two, which it connects by sockets; there, and on
several nodes, the link is measured first. `--repredict OLD.csv --csv NEW.csv` measures nothing: it
writes the rows of OLD with what the planner predicts now.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.clock import (
    is_main,
    largest,
    out_of_time,
    peak_bytes,
    release,
    say,
    summed,
    wait_for_all,
)
from scripts.bench.harness.rows import append_rows
from scripts.bench.harness.training_jobs import real_tokens
from scripts.bench.planner.cases import (
    CASES,
    NODES_CASES,
    Case,
    packed_rounds,
    parse_case,
    predict,
    typical_window,
)
from scripts.bench.planner.results import Row, read_csv, report, show
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.planner.cost.memory import MemoryUse
from tlora_megatron.planner.cost.step_terms import TERMS, StepCost
from tlora_megatron.planner.hardware import HardwareProfile, load_profile
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.profiling.timer import CollectiveTimer, fit_link

_WARM_ROUNDS, _FEWEST_ROUNDS = 2, 3
_MEAN_OF, _SKIPPED = 256, 64
"""Rounds whose mean the timed ones should be like, and that may pass before them."""


class Bench:
    """Runs cases one after another in this process's world."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.nodes, self.hardware = self._machine(load_profile(args.hardware))
        self.rows: list[Row] = []

    def _machine(self, profile: HardwareProfile) -> tuple[int, HardwareProfile]:
        """The number of nodes, and the profile with the link between them as it is now."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        nodes = self.args.nodes or self.world_size // local
        if self.args.nodes:
            divide_into_nodes(nodes, self.world_size)
        return nodes, profile if nodes == 1 else over_nodes(profile, nodes, self.world_size)

    def run(self) -> None:
        begin = time.monotonic()
        cases = CASES if self.nodes == 1 else NODES_CASES
        texts = self.args.cases or cases.get(self.world_size)
        if texts is None:
            raise ValueError(f"--cases must be given for a world of {self.world_size}")
        for case in [parse_case(text, self.world_size) for text in texts]:
            if case.plan.num_micro_batches is not None:
                raise ValueError(
                    f"{case.name!r} is of Megatron-LM's trainer, which is not run here"
                )
            cost, memory = predict(case, self.hardware)
            if memory.total_bytes > self.hardware.memory_bytes:
                say(f"{case.name}: left out, {memory.total_bytes / 2**30:.0f} GiB needed")
            elif out_of_time(begin, self.args.budget_s):
                say(f"{case.name}: left out for lack of time")
            else:
                self._run_case(case, cost, memory)

    def _run_case(self, case: Case, cost: StepCost, memory: MemoryUse) -> None:
        begin = time.monotonic()
        size = int(self.args.seconds / cost.step_time_s)
        size = min(max(size, _FEWEST_ROUNDS), self.args.rounds)
        rounds = packed_rounds(case, _MEAN_OF)
        first = typical_window(rounds[: _SKIPPED + size], size, _WARM_ROUNDS)
        measured = self._measure(case, first, size)
        where = {"commit": self.args.commit, "nodes": self.nodes}
        row = Row.of(case, (cost, memory), measured, **where)
        self.rows.append(row)
        terms = {name: round(getattr(cost, name), 4) for name in TERMS}
        terms = {name: seconds for name, seconds in terms.items() if seconds}
        say(f"{case.name}: {show(row)}  ({time.monotonic() - begin:.0f} s)")
        say(f"    predicted {json.dumps(terms)}")
        if is_main() and self.args.csv:
            append_rows(self.args.csv, [asdict(row)])

    def _measure(self, case: Case, first: int, size: int) -> tuple[float, float, int]:
        """Mean seconds and tokens of `size` rounds from `first` on; the largest peak of a rank."""
        on_gpu = torch.cuda.is_available()
        dtype = torch.bfloat16 if on_gpu else torch.float32
        base = {"recompute": case.plan.recompute, "quantisation": case.quantisation}
        run = SyntheticRun(case.spec, case.plan.layout, dtype=dtype, **base)
        try:
            model = run.super_model(case.jobs, case.plan.micro_batch_tokens)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(first - _WARM_ROUNDS):
                model.begin_round()
                model.end_round([])
            for _ in range(_WARM_ROUNDS):
                model.train_round()
            times: list[float] = []
            tokens: list[int] = []
            for _ in range(size):
                wait_for_all()
                begin = time.perf_counter()
                batches = model.begin_round()
                model.end_round(model.engine.forward_backward(batches))
                wait_for_all()
                times.append(time.perf_counter() - begin)
                tokens.append(sum(map(real_tokens, batches)))
            peak = peak_bytes()
            del model, batches
        finally:
            run.close()
        if on_gpu:
            free, total = torch.cuda.mem_get_info()
            beside = (total - free - torch.cuda.memory_reserved()) / 2**30
            say(f"memory beside torch's: {beside:.1f} GiB")
        release()
        (whole,) = summed([statistics.fmean(tokens)])
        (largest_peak,) = largest([peak])
        whole /= case.plan.tp_size * case.plan.pp_size
        return statistics.fmean(times), whole, int(largest_peak)


_BYTES = (1 << 20, 1 << 23, 1 << 26)


def divide_into_nodes(nodes: int, world_size: int) -> None:
    """Has NCCL take the processes of one machine for those of several; before it is started."""
    if nodes < 1 or world_size % nodes:
        raise ValueError(f"--nodes must divide the world of {world_size}, got {nodes}")
    rank = int(os.environ.get("RANK", "0"))
    os.environ["NCCL_HOSTID"] = f"node{rank // (world_size // nodes)}"


def over_nodes(profile: HardwareProfile, nodes: int, world_size: int) -> HardwareProfile:
    """The profile of smaller nodes with the link that an all-reduce over all of them has now."""
    from tlora_megatron.integrations.megatron.process_groups import initialize_parallel

    initialize_parallel(ParallelLayout(dp_size=world_size))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timer = CollectiveTimer(world_size, device)
    link = fit_link([timer.measure("all_reduce", size) for size in _BYTES])
    per_node = world_size // nodes
    near = tuple(point for point in profile.collectives if point.ranks <= per_node)
    return replace(
        profile, gpus_per_node=per_node, inter_node=link, nics_per_node=None, collectives=near
    )


def repredicted(row: Row, hardware: HardwareProfile) -> Row:
    """A row with what the planner says now; what was measured stays."""
    if row.nodes > 1:
        return row  # its link was measured there and then
    cost, memory = predict(parse_case(row.case, row.gpus), hardware)
    return replace(
        row,
        predicted_s=round(cost.step_time_s, 5),
        predicted_bytes=round(memory.allocated_bytes),
        predicted_round_tokens=round(cost.load.tokens),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if args.report:
        rows = read_csv(args.report)
    elif args.repredict:
        hardware = load_profile(args.hardware)
        rows = [repredicted(row, hardware) for row in read_csv(args.repredict)]
        for row in rows:
            print(show(row))
            if args.csv:
                append_rows(args.csv, [asdict(row)])
    else:
        bench = Bench(args)
        bench.run()
        rows = bench.rows
        if dist.is_initialized():
            dist.destroy_process_group()
        if not is_main():
            return 0
    for line in report(rows) if rows else []:
        print(line)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--hardware", type=Path, default=Path("configs/hardware/h200.json"))
    parser.add_argument("--cases", nargs="+", help="instead of the world size's own")
    parser.add_argument("--nodes", type=int, help="of one machine's GPUs, as if they were so many")
    parser.add_argument("--rounds", type=int, default=8, help="timed, at most")
    parser.add_argument("--seconds", type=float, default=8.0, help="of timed rounds, a case")
    parser.add_argument("--budget-s", type=float, default=240.0, help="no case starts after it")
    parser.add_argument("--report", type=Path, help="read this CSV and measure nothing")
    parser.add_argument("--repredict", type=Path, help="predict this CSV's cases again")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
