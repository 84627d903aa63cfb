#!/usr/bin/env python3
"""The planner's step time and peak memory against the super-model's, on the GPUs at hand.

    torchrun --standalone --nproc-per-node 4 scripts/bench/plan_vs_measured.py \
        --hardware configs/hardware/h200.json --csv scripts/bench/results/plan_vs_measured.csv
    python scripts/bench/plan_vs_measured.py --report scripts/bench/results/plan_vs_measured.csv \
        --plot scripts/bench/results/plan_vs_measured.png

Every case builds the project's own super-model on random weights under its layout, inside one
torchrun, runs whole rounds (packing, pipeline, optimizer steps) and writes its row at once. The
world size decides which run, unless `--cases` does: `MODEL/LAYERS tpN ppN RECOMPUTE JOBSj TOKENSt`,
what is left of the world is data parallel. A case that the planner thinks does not fit is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from tlora_megatron.model import ModelSpec, read_model_spec
from tlora_megatron.planner.candidate import Plan, Recompute
from tlora_megatron.planner.cost_model import TERMS, CostModel, StepCost
from tlora_megatron.planner.hardware import HardwareProfile, load_profile
from tlora_megatron.planner.memory import MemoryModel, MemoryUse
from tlora_megatron.planner.rates import Rates
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

LLAMA_8B = Path(__file__).parents[2] / "configs" / "models" / "llama-3.1-8b.json"
RANKS = (4, 8, 16, 16, 24, 32, 64, 64)
BATCHES = (1, 8, 2, 4, 8, 1, 4, 2)
"""Sequences a step of each job, on one GPU; on more, as many times that."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LENGTHS = (256, 265, 272, 284, 296, 313, 338, 376, 517, 837, 1171, 1686, 2018)
SHARES = (0.05, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.075, 0.045, 0.025, 0.005)
"""Of prompts and completions of five data sets: see `end_to_end_jobs`."""
CASES = {
    1: (
        "8b/32 tp1 pp1 none 8j 8192t",
        "8b/32 tp1 pp1 selective 8j 8192t",
        "8b/32 tp1 pp1 full 4j 8192t",
        "8b/32 tp1 pp1 none 2j 4096t",
        "8b/16 tp1 pp1 none 16j 16384t",
        "70b/8 tp1 pp1 none 4j 8192t",
        "70b/8 tp1 pp1 full 8j 8192t",
    ),
    2: (
        "8b/32 tp1 pp1 none 8j 8192t",
        "8b/32 tp2 pp1 none 8j 8192t",
        "8b/32 tp1 pp2 none 8j 8192t",
        "8b/32 tp2 pp1 selective 16j 8192t",
        "70b/16 tp2 pp1 none 8j 8192t",
        "70b/16 tp1 pp2 selective 4j 4096t",
        "8b/32 tp1 pp1 none 2j 4096t",
    ),
    4: (
        "8b/32 tp1 pp1 none 8j 8192t",
        "8b/32 tp2 pp1 none 8j 8192t",
        "8b/32 tp4 pp1 none 8j 8192t",
        "8b/32 tp1 pp2 none 8j 8192t",
        "8b/32 tp1 pp4 none 8j 8192t",
        "8b/32 tp2 pp2 none 8j 8192t",
        "70b/16 tp4 pp1 none 8j 8192t",
        "70b/16 tp1 pp4 none 8j 4096t",
        "70b/16 tp2 pp2 selective 16j 8192t",
        "70b/16 tp2 pp1 full 4j 8192t",
        "8b/32 tp1 pp1 none 2j 4096t",
    ),
    8: (
        "8b/32 tp1 pp1 none 16j 8192t",
        "8b/32 tp2 pp1 none 16j 8192t",
        "8b/32 tp8 pp1 none 16j 8192t",
        "8b/32 tp1 pp4 none 16j 8192t",
        "70b/32 tp8 pp1 none 8j 8192t",
        "70b/32 tp2 pp4 none 8j 4096t",
        "70b/32 tp1 pp8 none 8j 4096t",
        "70b/32 tp4 pp2 selective 16j 8192t",
    ),
}
_CASE = re.compile(
    r"(?P<model>8b|70b|tiny)/(?P<layers>\d+) tp(?P<tp>\d+) pp(?P<pp>\d+) "
    r"(?P<recompute>none|selective|full) (?P<jobs>\d+)j (?P<tokens>\d+)t"
)
_WARM_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case; the fields are the CSV's columns."""

    gpu: str
    commit: str
    gpus: int
    model: str
    layers: int
    tp: int
    pp: int
    dp: int
    recompute: str
    jobs: int
    tokens: int
    """Micro-batch budget."""
    predicted_s: float
    """Of a round."""
    measured_s: float
    predicted_bytes: int
    """Most that one GPU's tensors take."""
    measured_bytes: int
    predicted_round_tokens: int
    """Rows of all jobs in a round."""
    measured_round_tokens: int

    @property
    def time_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured, less 1; 0 where memory is not measured."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is run."""

    name: str
    model: str
    spec: ModelSpec
    plan: Plan
    jobs: tuple[JobLoad, ...]


def parse_case(text: str, world_size: int) -> Case:
    """Reads a case for a world.

    Raises:
        ValueError: if it is malformed or its sizes do not divide the world.
    """
    match = _CASE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a case must look like {CASES[1][0]!r}, got {text!r}")
    tp, pp = int(match["tp"]), int(match["pp"])
    if world_size % (tp * pp):
        raise ValueError(f"tp * pp must divide the world of {world_size}, got {text!r}")
    plan = Plan(
        tp_size=tp,
        pp_size=pp,
        dp_size=world_size // (tp * pp),
        sequence_parallel=tp > 1,
        micro_batch_tokens=int(match["tokens"]),
        recompute=cast(Recompute, match["recompute"]),
    )
    spec = replace(model_spec(match["model"]), num_layers=int(match["layers"]))
    jobs = make_jobs(int(match["jobs"]), world_size, min(LENGTHS[-1], plan.micro_batch_tokens // 4))
    return Case(name=text.strip(), model=match["model"], spec=spec, plan=plan, jobs=jobs)


def model_spec(name: str) -> ModelSpec:
    """Llama-3.1's shapes by size, or one for a CPU."""
    base = read_model_spec(LLAMA_8B)
    sizes = {
        "8b": {},
        "70b": {"hidden_size": 8192, "num_heads": 64, "ffn_size": 28672},
        "tiny": {
            "hidden_size": 64,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 8,
            "ffn_size": 96,
            "vocab_size": 512,
        },
    }
    return replace(base, **cast(Any, sizes[name]))


def make_jobs(count: int, world_size: int, longest: int) -> tuple[JobLoad, ...]:
    """Heterogeneous jobs: ranks 4 to 64, every third on attention only, batches of 1 to 8 a GPU."""
    lengths = LengthHistogram.from_counts(zip(LENGTHS, SHARES, strict=True)).clipped(longest)
    jobs = []
    for i in range(count):
        job = JobLoad(
            name=f"job{i}",
            rank=RANKS[i % len(RANKS)],
            batch_size=BATCHES[i % len(BATCHES)] * world_size,
            lengths=lengths,
        )
        jobs.append(replace(job, targets=ATTENTION) if i % 3 == 2 else job)
    return tuple(jobs)


def predict(case: Case, hardware: HardwareProfile) -> tuple[StepCost, MemoryUse]:
    """What the planner says."""
    cost = CostModel(case.spec, case.jobs, Rates(hardware)).step_cost(case.plan)
    return cost, MemoryModel(case.spec, case.jobs, hardware).use(case.plan)


class Bench:
    """Runs cases one after another in this process's world."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.is_main = os.environ.get("RANK", "0") == "0"
        self.hardware = load_profile(args.hardware)
        self.rows: list[Row] = []

    def run(self) -> None:
        """All cases that there is time and memory for."""
        end = time.monotonic() + self.args.budget_s
        texts = self.args.cases or CASES[self.world_size]
        for case in [parse_case(text, self.world_size) for text in texts]:
            cost, memory = predict(case, self.hardware)
            if memory.total_bytes > self.hardware.memory_bytes:
                self._say(f"{case.name}: left out, {memory.total_bytes / 2**30:.0f} GiB needed")
            elif self._any(time.monotonic() > end):
                self._say(f"{case.name}: left out for lack of time")
            else:
                self._run_case(case, cost, memory)

    def _run_case(self, case: Case, cost: StepCost, memory: MemoryUse) -> None:
        begin = time.monotonic()
        measured_s, tokens, peak = self._measure(case)
        plan = case.plan
        row = Row(
            gpu=_device_name(),
            commit=self.args.commit or _git_commit(),
            gpus=self.world_size,
            model=f"llama-3.1-{case.model}" if case.model != "tiny" else "tiny",
            layers=case.spec.num_layers,
            tp=plan.tp_size,
            pp=plan.pp_size,
            dp=plan.dp_size,
            recompute=plan.recompute,
            jobs=len(case.jobs),
            tokens=plan.micro_batch_tokens,
            predicted_s=round(cost.step_time_s, 5),
            measured_s=round(measured_s, 5),
            predicted_bytes=round(memory.allocated_bytes),
            measured_bytes=peak,
            predicted_round_tokens=round(cost.load.tokens),
            measured_round_tokens=round(tokens),
        )
        self.rows.append(row)
        terms = {
            name: round(getattr(cost, name), 4) for name in TERMS if getattr(cost, name) > 5e-5
        }
        self._say(f"{case.name}: {show(row)}  ({time.monotonic() - begin:.0f} s)")
        self._say(f"    predicted {json.dumps(terms)}")
        if self.is_main and self.args.csv:
            append_csv(Path(self.args.csv), row)

    def _measure(self, case: Case) -> tuple[float, float, int]:
        """Seconds and tokens of a round, and the largest peak of any rank."""
        import torch

        from tlora_megatron.runtime.synthetic_run import SyntheticRun

        on_gpu = torch.cuda.is_available()
        dtype = torch.bfloat16 if on_gpu else torch.float32
        run = SyntheticRun(case.spec, case.plan.layout, dtype=dtype, recompute=case.plan.recompute)
        try:
            model = run.super_model(case.jobs, case.plan.micro_batch_tokens)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(_WARM_ROUNDS):
                model.train_round()
            times: list[float] = []
            tokens: list[int] = []
            end = time.monotonic() + self.args.seconds
            while len(times) < self.args.rounds and (len(times) < 3 or not self._late(end)):
                self._wait()
                begin = time.perf_counter()
                batches = model.begin_round()
                model.end_round(model.engine.forward_backward(batches))
                self._wait()
                times.append(time.perf_counter() - begin)
                tokens.append(sum(map(_real_tokens, batches)))
            peak = torch.cuda.max_memory_allocated() if on_gpu else 0
            del model, batches
        finally:
            run.close()
        held = torch.cuda.memory_allocated() if on_gpu else 0
        if held > 2**30:
            self._say(f"memory still held: {held / 2**30:.1f} GiB")
        whole = _summed(statistics.fmean(tokens)) / (case.plan.tp_size * case.plan.pp_size)
        return statistics.fmean(times), whole, int(_largest(peak))

    def _late(self, end: float) -> bool:
        return self._any(time.monotonic() > end)

    def _any(self, value: bool) -> bool:
        """Whether it holds on any rank: all must go the same way."""
        import torch.distributed as dist

        return bool(_largest(float(value))) if dist.is_initialized() else value

    def _wait(self) -> None:
        import torch
        import torch.distributed as dist

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()

    def _say(self, text: str) -> None:
        if self.is_main:
            print(text, flush=True)


def _real_tokens(batch: Any) -> int:
    view = batch.view
    return sum(p.length for p in view.pieces if p.document.slot != view.num_slots)


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _largest(value: float) -> float:
    return _reduced(value, "MAX")


def _summed(value: float) -> float:
    return _reduced(value, "SUM")


def _reduced(value: float, op: str) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(float(value), dtype=torch.float64, device=_device())
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return float(tensor)


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _git_commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def show(row: Row) -> str:
    """A row for reading."""
    return (
        f"{row.predicted_s * 1e3:8.1f} ms predicted, {row.measured_s * 1e3:8.1f} measured "
        f"({row.time_error:+.1%}); {row.predicted_bytes / 2**30:6.1f} GiB, "
        f"{row.measured_bytes / 2**30:6.1f} ({row.memory_error:+.1%}); tokens "
        f"{row.predicted_round_tokens}, {row.measured_round_tokens}"
    )


def append_csv(path: Path, row: Row) -> None:
    """Adds one row, the header first if the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(asdict(row))


def read_csv(path: Path) -> list[Row]:
    """All rows of a file."""
    kinds = {f.name: {"int": int, "float": float, "str": str}[str(f.type)] for f in fields(Row)}
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(**cast(Any, {k: kinds[k](v) for k, v in row.items()}))
            for row in csv.DictReader(file)
        ]


def report(rows: Sequence[Row]) -> list[str]:
    """Errors over all rows, and of each mix run under several layouts the choice."""
    times = sorted(abs(row.time_error) for row in rows)
    lines = [
        f"{len(rows)} cases; step time: median error {statistics.median(times):.1%}, "
        f"worst {times[-1]:.1%}"
    ]
    memory = [row.memory_error for row in rows if row.measured_bytes]
    if memory:
        lines.append(f"peak memory: {min(memory):+.1%} to {max(memory):+.1%}")
    groups = defaultdict(list)
    for row in rows:
        groups[row.gpu, row.gpus, row.model, row.layers, row.recompute, row.jobs].append(row)
    for key, members in groups.items():
        layouts = {(r.tp, r.pp, r.dp) for r in members}
        if len(layouts) > 1:
            lines.append(_choice(key, members))
    return lines


def _choice(key: tuple[Any, ...], rows: Sequence[Row]) -> str:
    def measured(row: Row) -> float:
        return row.measured_round_tokens / row.measured_s

    chosen = max(rows, key=lambda row: row.predicted_round_tokens / row.predicted_s)
    best = max(rows, key=measured)
    where = f"{key[0]} x{key[1]} {key[2]}/{key[3]} {key[5]} jobs"
    return (
        f"{where}: chosen TP{chosen.tp} PP{chosen.pp} DP{chosen.dp} {measured(chosen):,.0f} "
        f"tokens/s, {measured(chosen) / measured(best):.1%} of the best measured, "
        f"TP{best.tp} PP{best.pp} DP{best.dp}"
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Predicted against measured step time and peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 5))
    parts = (
        ("step time, s", [(r.measured_s, r.predicted_s, r) for r in rows], 0.1),
        (
            "peak memory, GiB",
            [
                (r.measured_bytes / 2**30, r.predicted_bytes / 2**30, r)
                for r in rows
                if r.measured_bytes
            ],
            0.1,
        ),
    )
    for axis, (title, points, band) in zip(axes, parts, strict=True):
        for gpus in sorted({row.gpus for *_, row in points}):
            for model, marker in (("8b", "o"), ("70b", "s"), ("tiny", "^")):
                own = [p for p in points if p[2].gpus == gpus and p[2].model.endswith(model)]
                if own:
                    xs, ys = [p[0] for p in own], [p[1] for p in own]
                    axis.scatter(xs, ys, marker=marker, label=f"{gpus} GPU, {model}", alpha=0.8)
        if points:
            ends = [min(p[0] for p in points) * 0.8, max(p[0] for p in points) * 1.2]
            axis.plot(ends, ends, color="grey", linewidth=1)
            low, high = ([e * (1 + s * band) for e in ends] for s in (-1, 1))
            axis.fill_between(ends, low, high, color="grey", alpha=0.15, label="within 10 %")
            axis.set(xscale="log", yscale="log")
        axis.set(title=title, xlabel="measured", ylabel="predicted")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, or reports on a file."""
    args = _arguments(argv)
    if args.report:
        rows = read_csv(args.report)
    else:
        bench = Bench(args)
        bench.run()
        rows = bench.rows
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        if not bench.is_main:
            return 0
    for line in report(rows) if rows else []:
        print(line)
    if args.plot and rows:
        plot(rows, args.plot)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", type=Path, default=Path("configs/hardware/h200.json"))
    parser.add_argument("--cases", nargs="+", help="instead of the world size's own")
    parser.add_argument("--rounds", type=int, default=8, help="timed, at most")
    parser.add_argument("--seconds", type=float, default=8.0, help="of timed rounds, a case")
    parser.add_argument("--budget-s", type=float, default=240.0, help="no case starts after it")
    parser.add_argument("--csv", help="append rows to this file")
    parser.add_argument("--commit", default="", help="where git is not at hand")
    parser.add_argument("--report", type=Path, help="read this CSV and measure nothing")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
