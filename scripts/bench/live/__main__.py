"""Measures the cost of jobs that join and leave a super-model while it trains.

    python -m scripts.bench.live --tiny --jobs 4 --rank 8 --tokens 256      # on a CPU, to try it

Jobs of one rank on all linears train over random weights at the shapes of an 8B model.

`join`: a prepared job joins 16 that train; from one wait for the device to the next, so with all
copies of adapters; `join, first` meets an allocator that has seen none. `resident over train`:
rounds of a loop that serves commands over those of a run, same jobs, in turns. `20 joins in 10
min`: share of the tokens that are lost if a job is prepared, joins and leaves every 30 seconds.
Returns 1 if a figure misses what it must be. `scripts.bench.live.throughput` measures whole
processes instead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.clock import is_main, wait_for_all, wait_for_device
from scripts.bench.harness.rows import Figures, gpu_name
from scripts.bench.harness.training_jobs import job_on
from scripts.bench.planner.cases import model_spec
from scripts.bench.step.jobs import endless_job, sequence
from tlora_megatron.config.job import JobSpec, LoraSpec
from tlora_megatron.config.schema import RunSpec
from tlora_megatron.layers.adapter_bank import AdapterBank, BankShape
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.data.job_data import BatchPlan, JobData
from tlora_megatron.training.job_files import JobFiles
from tlora_megatron.training.job_saves import SavePolicy, StagedJob
from tlora_megatron.training.loop import Loop
from tlora_megatron.training.resident.commands import JobCommands
from tlora_megatron.training.resident.staging import Order, Stager
from tlora_megatron.training.run.determinism import frozen_gc
from tlora_megatron.training.run.preparation import PreparedJob
from tlora_megatron.training.super_model import SuperModel

MUST = {"join, median": 50.0, "resident over train": 0.5, "20 joins in 10 min": 2.0}
_SEQUENCE, _SEQUENCES = 512, 64
_JOINS = 5


def files_of(run: RunSpec) -> JobFiles:
    is_writer = dist.get_rank() == 0
    return JobFiles(run, base_model="random", quantisation=None, has_metrics=is_writer)


class Bench:
    """A super-model with jobs, and both loops over it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        spec = replace(model_spec("tiny"), num_layers=2) if args.tiny else model_spec("8b")
        spec = spec if args.layers is None else replace(spec, num_layers=args.layers)
        world = max(1, args.tp)
        layout = ParallelLayout(tp_size=args.tp, sequence_parallel=True).for_world(world)
        on_gpu = torch.cuda.is_available()
        self.run = SyntheticRun(spec, layout, dtype=torch.bfloat16 if on_gpu else torch.float32)
        lora = LoraSpec(rank=args.rank)
        shape = BankShape(
            targets=frozenset(lora.target_modules), kept_ranks=args.rank * (args.jobs + 2)
        )
        self.bank = AdapterBank(
            self.run.sites, shape, dtype=self.run.dtype, device=self.run.groups.device
        )
        attach(self.run.linears, self.bank)
        engine: Any = self.run.engine
        self.model = SuperModel(
            engine, self.bank, self.run.groups, [], micro_batch_tokens=args.tokens
        )
        self.settings = RunSpec(output_dir=str(folder), tensorboard=False, checkpoint_every_steps=0)
        self.live = Loop(
            self.model, spec, self.settings, files_of(self.settings), self,
            is_live=True,
        )  # fmt: skip
        self.live.saver.expect(lora)
        group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        stager = Stager(
            self.bank, spec, self.read_order, lambda _: None, self.live.files.open_metrics
        )
        self.commands = JobCommands(self.live, stager, group)
        self.events: list[tuple[float, str, str | None, Mapping[str, Any]]] = []
        self._number = 0

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        self.events.append((time.perf_counter(), kind, job, body))

    def job_spec(self, name: str) -> JobSpec:
        """A job whose batch fills half a micro-batch; each steps once in `jobs / 2` rounds."""
        self._number += 1
        per_round = max(2, self.args.tokens // _SEQUENCE)
        lora = LoraSpec(rank=self.args.rank)
        return endless_job(name, lora, per_round // 2, _SEQUENCE, self._number)

    def data(self, seed: int) -> JobData:
        """Sequences of one length, so that all rounds are equally long."""
        draw, size = np.random.default_rng(seed), min(_SEQUENCE, self.args.tokens // 2)
        vocab_size = self.run.spec.vocab_size
        train = tuple(sequence(draw, size, vocab_size, 0.5) for _ in range(_SEQUENCES))
        return JobData(train=train, eval=(), num_truncated=0, num_dropped=0)

    def read_order(self, order: Order) -> PreparedJob:
        """Prepares a job as a rank does; its tokens are drawn, not mapped from a cache."""
        job = self.job_spec(order["job"])
        data = self.data(job.seed)
        plan = BatchPlan.for_job(job, len(data.train))
        return PreparedJob(spec=job, data=data, plan=plan, checkpoint=None, imported=None)

    def staged(self, name: str) -> StagedJob:
        """A job on the device at once: drawing its factors as a run does takes seconds."""
        job = self.job_spec(name)
        slab = self.bank.new_slab(job.lora)
        slab.master.normal_(0.0, self.run.spec.hidden_size**-0.5)
        state = job_on(slab, job, self.data(job.seed).train)
        metrics = self.live.files.open_metrics(state)
        return StagedJob(state=state, digest="", copied=None, metrics=metrics, saving=SavePolicy())

    def join_ms(self, name: str) -> float:
        """Milliseconds for which co-trained jobs stand still, the device's copies included."""
        staged = self.staged(name)
        wait_for_all()
        begin_s = time.perf_counter()
        self.live.join(staged)
        wait_for_device()
        return 1e3 * (time.perf_counter() - begin_s)

    def round_s(self) -> float:
        wait_for_all()
        begin_s = time.perf_counter()
        self.live.step()
        wait_for_device()
        return time.perf_counter() - begin_s


class Rounds:
    """A source of commands that measures so many rounds of a loop that serves, then stops it."""

    def __init__(self, count: int, commands: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
        self._count, self._commands = count, commands
        self._looks = 0
        self.seconds = 0.0

    def wait(self, seconds: float) -> None:
        """The bench's jobs never end."""

    def take(self) -> Sequence[Mapping[str, Any]]:
        if self._looks in (0, self._count):
            wait_for_device()
            self.seconds = time.perf_counter() - self.seconds
        self._looks += 1
        if self._looks > self._count:
            return [{"kind": "stop", "body": {"save": False}}]
        return self._commands.get(self._looks, ())


def train_s(loop: Loop, count: int) -> float:
    with frozen_gc():
        wait_for_device()
        begin_s = time.perf_counter()
        for _ in range(count):
            loop.step()
        wait_for_device()
        return time.perf_counter() - begin_s


def resident_s(
    bench: Bench, count: int, commands: Mapping[int, Sequence[Mapping[str, Any]]] | None = None
) -> float:
    """Seconds of rounds in a loop that serves commands, which it looks for before each."""
    source = Rounds(count, commands or {})
    bench.commands.serve(source if dist.get_rank() == 0 else None)
    return source.seconds


def measure_joins(bench: Bench) -> dict[str, tuple[float, str]]:
    """Joins into as many jobs as asked for, each beside a warm round."""
    times = [bench.join_ms(f"job{index}") for index in range(bench.args.jobs)]
    usual = statistics.median(bench.round_s() for _ in range(8))
    joins, behind = [], []
    for index in range(_JOINS):
        joins.append(bench.join_ms(f"late{index}"))
        behind.append(bench.round_s())
        bench.live.leave(f"late{index}", save=False)
        bench.round_s()
    return {
        "join, first": (times[0], "ms"),
        "join, median": (statistics.median(joins), "ms"),
        "join, longest": (max(joins), "ms"),
        "round": (1e3 * usual, "ms"),
        "round behind a join": (1e3 * statistics.median(behind), "ms"),
    }


def _cycle(bench: Bench) -> int:
    """Rounds in which every job takes equally many steps, so that turns do equal work."""
    return max(1, bench.args.jobs // 2)


def measure_overhead(bench: Bench, folder: Path) -> dict[str, tuple[float, str]]:
    """Both loops in turns of one cycle over the same jobs; turns before and after are the other's.

    Machines have slow moments, so each pair of turns is one ratio, and the middle of all counts.
    `+-` is the standard error of that middle, from the middle half of the ratios.
    """
    settings = replace(bench.settings, output_dir=str(folder / "train"))
    train = Loop(bench.model, bench.run.spec, settings, files_of(settings))
    count, ratios = _cycle(bench), list[float]()
    turns: list[Callable[[], float]] = [
        partial(train_s, train, count),
        partial(resident_s, bench, count),
    ]
    for run in turns:  # what loops do once
        run()
    for turn in range(bench.args.turns):
        order = turns if turn % 2 == 0 else turns[::-1]
        found = {run: run() for run in order}
        ratios.append(found[turns[1]] / found[turns[0]])
    lower, middle, upper = np.percentile(ratios, (25, 50, 75))
    error = 1.253 * (upper - lower) / 1.349 / len(ratios) ** 0.5
    return {
        "resident over train": (100 * (middle - 1), "%"),
        "resident over train, +-": (100 * error, "%"),
    }


def measure_cost(bench: Bench) -> dict[str, tuple[float, str]]:
    """Rounds with one job that comes and goes, over rounds without."""
    count, lost = 6 * _cycle(bench), list[float]()
    drawn: list[float] = []
    for turn in range(2):
        name = f"guest{turn}"
        guest: dict[int, Sequence[Mapping[str, Any]]] = {
            1: [{"kind": "prepare", "job": name}, {"kind": "join", "job": name}],
            count - 2: [{"kind": "leave", "job": name, "body": {"save": False}}],
        }
        alone_s = resident_s(bench, count)
        bench.events.clear()
        begin_s = time.perf_counter()
        lost.append(resident_s(bench, count, guest) - alone_s)
        drawn += [at_s - begin_s for at_s, kind, *_ in bench.events if kind == "joined"]
    joined = statistics.median(drawn) if drawn else float("nan")
    lost_s = statistics.median(lost)
    return {
        "lost by a job that comes and goes": (1e3 * lost_s, "ms"),
        "20 joins in 10 min": (100 * 20 * lost_s / 600, "%"),
        "order to join": (joined, "s"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096, help="rows of a micro-batch")
    parser.add_argument("--turns", type=int, default=24, help="of each loop")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        found = measure_joins(bench)
        found |= measure_overhead(bench, Path(folder))
        found |= measure_cost(bench)
        bench.commands.close()
        bench.live.saves.close()
    tiny = "tiny, " if args.tiny else ""
    figures = Figures(
        csv=args.csv, commit=args.commit, engine="none", gpu=gpu_name(),
        world=dist.get_world_size(), about=f"{tiny}{args.jobs} jobs of rank {args.rank}: ",
    )  # fmt: skip
    for case, (value, unit) in found.items() if is_main() else ():
        figures.row(case, value, unit, most=MUST.get(case))
    return int(bool(figures.missed))


if __name__ == "__main__":
    sys.exit(main())
