"""Recompute chosen by micro-batch against one recompute for all, in little memory, on one GPU.

    python -m scripts.bench.recompute_by_micro_batch --csv scripts/bench/results/rounds.csv

Twelve jobs of lognormal lengths up to 16,384 rows (`scripts.bench.rounds.mixes`) train adapters of
rank 16 on all linears over random weights at the shapes of an 8B model; torch may take
`--memory-gb` of the GPU. The lightest recompute for all that fits is held against the table of
recompute by rows that the planner makes for the same memory. Both train the same sequences: a small
batch of every job to warm up, then one that is timed. A predicted time is the planner's for the
very micro-batches that ran. Returns 1 if less than 12 % of the time is saved.

`--modes none selective full auto` measures others too; what does not fit is left out by name.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.clock import wait_for_device
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.planner.cases import model_spec
from scripts.bench.rounds.mixes import lognormals
from tlora_megatron.config.schema import Recompute
from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.model.layout import RECOMPUTES, ParallelLayout, RecomputeTable
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.choices import recompute_for_rows
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.cost.replica_rate import replica_rate
from tlora_megatron.planner.hardware import HardwareProfile, load_profile
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.data.job_data import JobData
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.packing import PackedBatch
from tlora_megatron.training.run.environment import let_segments_grow
from tlora_megatron.training.super_model import SuperModel

MUST = 0.12
PROFILE = REPO / "configs" / "hardware" / "h200.json"


class Mode(NamedTuple):
    """A way to run: the recompute of all micro-batches, or that of each by its rows."""

    name: str
    built: Recompute
    table: RecomputeTable | None


class Measured(NamedTuple):
    """A mode's times and memory."""

    mode: Mode
    step_s: float
    predicted_s: float
    losses: dict[str, float]
    """Each job's timed step."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The jobs, the memory, and what the planner says of them."""

    spec: ModelSpec
    hardware: HardwareProfile
    memory_bytes: float
    """For torch's tensors."""
    tokens: int
    """Budget of rows of a micro-batch."""
    lengths: dict[str, list[list[int]]]
    """Rows of each job's sequences, by step."""

    @cached_property
    def loads(self) -> list[JobLoad]:
        """The jobs as the planner sees them."""
        found = []
        for name, steps in self.lengths.items():
            rows = LengthHistogram.from_lengths([n for step in steps for n in step])
            found.append(JobLoad(name=name, rank=16, batch_size=len(steps[-1]), lengths=rows))
        return found

    @cached_property
    def memory(self) -> MemoryModel:
        """Predicts bytes."""
        return MemoryModel(self.spec, self.loads, self.hardware)

    @property
    def budget_bytes(self) -> float:
        """Memory of the GPU, with what is beside torch's tensors."""
        return self.memory_bytes + self.hardware.reserved_bytes

    def modes(self) -> dict[str, Mode]:
        """Returns the modes that fit, those of one recompute first, the lightest first."""
        found = {}
        for name in RECOMPUTES:
            plan = Plan(micro_batch_tokens=self.tokens, recompute=name)
            if self.memory.use(plan, self.tokens).total_bytes <= self.budget_bytes:
                found[name] = Mode(name, name, None)
        plan = Plan(micro_batch_tokens=self.tokens)
        table = recompute_for_rows(self.memory, plan, self.budget_bytes)
        return found | {"auto": Mode("auto", "none", table)}

    def rate(self, recompute: Recompute) -> ReplicaRate:
        """The planner's speed of the GPU under one recompute."""
        plan = Plan(micro_batch_tokens=self.tokens, recompute=recompute)
        return replica_rate(self.spec, self.loads, plan, self.hardware)

    def predicted_s(self, mode: Mode, batches: Sequence[PackedBatch]) -> float:
        """Predicts the time of micro-batches that a mode has run."""
        names = {mode.built} if mode.table is None else {name for name, _ in mode.table.most_rows}
        rates = {name: self.rate(name) for name in names}
        total_ps = 0
        for view in (batch.view for batch in batches):
            rate = rates[view.recompute or mode.built]
            total_ps += rate.fixed_ps + sum(rate.sequence_ps(d.length) for d in view.documents)
        return total_ps / 1e12


@dataclass(frozen=True, slots=True)
class _InOrder:
    """A job's batches as they were drawn."""

    sizes: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        """Batches that there are."""
        return len(self.sizes)

    def indices(self, step: int) -> list[int]:
        """The sequences of a step."""
        begin = sum(self.sizes[:step])
        return list(range(begin, begin + self.sizes[step]))


def measure(bench: Bench, mode: Mode) -> Measured:
    """Trains a small step of every job to warm up, then one with a watch."""
    on_gpu = torch.cuda.is_available()
    if mode.table is not None:
        print(f"{mode.name}: {mode.table.line}", flush=True)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    run = SyntheticRun(bench.spec, ParallelLayout(), dtype=dtype, recompute=mode.built)
    torch.manual_seed(0)  # adapters of all modes begin alike
    model = run.super_model(bench.loads, bench.tokens)
    model.round_shape = replace(model.round_shape, recompute=mode.table)
    for job, steps in zip(model.jobs, bench.lengths.values(), strict=True):
        sequences = tuple(_sequence(n, bench.spec.vocab_size) for step in steps for n in step)
        job.data = JobData(train=sequences, eval=(), num_truncated=0, num_dropped=0)
        plan: Any = _InOrder(tuple(map(len, steps)))
        job.plan = plan
    _train_until(model, 1)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    wait_for_device()
    begin = time.perf_counter()
    batches = _train_until(model, 2)
    wait_for_device()
    step_s = time.perf_counter() - begin
    losses = {job.name: job.last_loss for job in model.jobs if job.last_loss is not None}
    found = Measured(mode, step_s, bench.predicted_s(mode, batches), losses)
    _tell(found, batches)
    del model, batches
    run.close()
    return found


def _train_until(model: SuperModel, step: int) -> list[PackedBatch]:
    """Trains every job up to a step; jobs that are there wait. Returns the micro-batches."""
    jobs, found = model.jobs, []
    while open_jobs := [job for job in jobs if job.step < step]:
        if len(open_jobs) != len(model.jobs):
            model.set_jobs(open_jobs)
        batches = model.begin_round()
        model.end_round(model.engine.forward_backward(batches))
        found += batches
    model.set_jobs(jobs)
    return found


def _sequence(rows: int, vocab_size: int) -> TokenSequence:
    import numpy as np

    tokens = np.random.default_rng(rows).integers(0, vocab_size, rows + 1, dtype=np.int32)
    return TokenSequence(tokens, np.arange(rows + 1) > 0)


def _tell(found: Measured, batches: Sequence[PackedBatch]) -> None:
    mode, seen, rows = found.mode, Counter[str](), Counter[str]()
    for view in (batch.view for batch in batches):
        name = view.recompute or mode.built
        seen[name] += 1
        rows[name] += view.num_tokens
    parts = [f"{seen[name]} {name} of {rows[name] / seen[name]:,.0f} rows" for name in seen]
    print(
        f"{mode.name}: {found.step_s:.3f} s a step, predicted "
        f"{found.predicted_s:.3f}; micro-batches: {', '.join(parts)}", flush=True,
    )  # fmt: skip
    if torch.cuda.is_available():
        stats = torch.cuda.memory_stats()
        print(
            f"    peak {stats['allocated_bytes.all.peak'] / 1e9:.1f} GB of tensors, "
            f"{stats['reserved_bytes.all.peak'] / 1e9:.1f} GB reserved, "
            f"{stats['num_alloc_retries']} times memory was given back for more", flush=True,
        )  # fmt: skip


def drawn_lengths(batches: Sequence[int], longest: int) -> dict[str, list[list[int]]]:
    """Draws each job's sequences by step: one of every part of its sorted lengths."""
    draw, found = random.Random(0), {}
    for name, lengths in lognormals().items():
        ordered = sorted(min(longest, rows) for rows in lengths)
        found[name] = [
            [
                draw.choice(ordered[len(ordered) * i // n : len(ordered) * (i + 1) // n])
                for i in range(n)
            ]
            for n in batches
        ]
    return found


def row_of(found: Measured, args: argparse.Namespace) -> dict[str, Any]:
    """A row of `results/rounds.csv`."""
    mode = found.mode
    table = "" if mode.table is None else f" ({mode.table.line})"
    return {
        "gpu": gpu_name(),
        "world": 1,
        "commit": args.commit,
        "lengths": f"lognormals, batches of {args.batch}",
        "layout": f"{args.model} DP1, {args.tokens} tokens, {args.memory_gb:g} GB",
        "mode": f"recompute {mode.name}{table}",
        "step_s": round(found.step_s, 4),
        "busy_share": 1.0,
        "predicted_s": round(found.predicted_s, 4),
    }


def main() -> int:
    """Measures the modes one after another; 1 = less is saved than must be."""
    parser = bench_parser(__doc__)
    parser.add_argument("--memory-gb", type=float, default=48.0, help="for torch's tensors")
    parser.add_argument("--modes", nargs="+", choices=(*RECOMPUTES, "auto"), help="see above")
    parser.add_argument("--model", default="8b", help="shape; tiny for a test on a CPU")
    parser.add_argument("--batch", type=int, default=16, help="timed sequences of each job")
    parser.add_argument("--warm", type=int, default=4, help="sequences of each job to warm up")
    parser.add_argument("--longest", type=int, default=16384, help="rows sequences are cut at")
    parser.add_argument("--tokens", type=int, default=24576, help="budget of a micro-batch")
    parser.add_argument("--hardware", type=Path, default=PROFILE, help="profile of the GPU")
    args = parser.parse_args()
    let_segments_grow()
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_gb * 1e9 / total))
    bench = Bench(
        spec=model_spec(args.model),
        hardware=load_profile(args.hardware),
        memory_bytes=args.memory_gb * 1e9,
        tokens=args.tokens,
        lengths=drawn_lengths((args.warm, args.batch), args.longest),
    )
    fitting = bench.modes()
    fixed = next(iter(fitting))
    if fixed == "auto":
        raise ValueError(f"--memory-gb must hold {args.tokens} rows under recompute full")
    names = args.modes or (fixed, "auto")
    for name in (name for name in names if name not in fitting):
        print(f"{name} is left out: {args.tokens} rows do not fit {args.memory_gb:g} GB")
    results = {name: _within_memory(bench, name) for name in names if name in fitting}
    if args.csv:
        append_rows(args.csv, [row_of(found, args) for found in results.values()])
    return _judge(results["auto"], results[fixed]) if {"auto", fixed} <= results.keys() else 0


def _within_memory(bench: Bench, name: str) -> Measured:
    """Measures a mode; of one that memory is too short for, one that is told of 5 % less."""
    try:
        return measure(bench, bench.modes()[name])
    except torch.cuda.OutOfMemoryError as error:
        print(f"{name}: {str(error).splitlines()[0]}; again with 5 % less told", flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    return _within_memory(replace(bench, memory_bytes=0.95 * bench.memory_bytes), name)


def _judge(auto: Measured, fixed: Measured) -> int:
    saved, wanted = 1 - auto.step_s / fixed.step_s, 1 - auto.predicted_s / fixed.predicted_s
    apart = max(abs(auto.losses[name] / loss - 1) for name, loss in fixed.losses.items())
    print(
        f"auto saves {saved:.1%} of {fixed.mode.name}'s step time (predicted {wanted:.1%}, must "
        f"{MUST:.0%}); losses differ by {apart:.1e} at most"
    )
    return int(saved < MUST)


if __name__ == "__main__":
    sys.exit(main())
