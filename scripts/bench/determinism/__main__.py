"""Checks that a job's bits are its own, and times what that costs.

    python -m scripts.bench.determinism --size toy --steps 3 --rounds 2

A watched job of each drawn mix trains alone, again, beside neighbours of which one's weights
overflow, beside others, and resumed beside others; losses, gradient norms, weights and moments must
have one sha256. `runs` and `equal` count those after the first. Then jobs that fill one micro-batch
exactly train with the fastest kernels and with the exact ones in turns, in rounds of which medians
are told. Returns 1 if a run is not equal.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import statistics
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from scripts.bench.determinism.cases import (
    CASES,
    DOCUMENTS,
    SIZES,
    Case,
    Mix,
    Plan,
    Size,
    cases_of,
    read_mix,
    timed_jobs,
)
from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.clock import Marks, is_main, largest, say, wait_for_all
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.harness.training_jobs import job_on
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen import flash4
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.nano.rounds import rank_aware_cut
from tlora_megatron.training.packing.packing import RoundShape
from tlora_megatron.training.super_model import SuperModel


class Saved(NamedTuple):
    """A job between two steps: what a checkpoint keeps of it on this rank."""

    progress: dict[str, Any]
    buffers: dict[str, torch.Tensor]


class Bits(NamedTuple):
    """The outcome of a job, over all ranks; equal ones are equal to the bit."""

    losses: tuple[tuple[float, float], ...]
    """Loss and gradient norm of every step."""
    adapter: str
    """sha256 of weights and moments."""

    def sha256(self) -> str:
        numbers = [x for pair in self.losses for x in pair]
        digest = hashlib.sha256(struct.pack(f"={len(numbers)}d", *numbers))
        digest.update(self.adapter.encode())
        return digest.hexdigest()


class Training:
    """Trains jobs on one base model; the rounds' shape has an `Exactness` for the promise."""

    def __init__(
        self, run: SyntheticRun, shape: RoundShape, micro_batch_tokens: int, nano_batches: int = 1
    ) -> None:
        self.run = run
        self.shape = shape
        self.micro_batch_tokens = micro_batch_tokens
        self.nano_batches = nano_batches

    def super_model(
        self, plans: Sequence[Plan], saved: tuple[str, Saved] | None = None
    ) -> SuperModel[Any]:
        """Puts jobs on the base model in the place of those before; one of them may go on."""
        run, specs = self.run, [plan.spec() for plan in plans]
        bank = AdapterBank(
            run.sites, [spec.lora for spec in specs], dtype=run.dtype, device=run.groups.device
        )
        attach(run.linears, bank)
        if self.nano_batches > 1:
            run.engine.nano_batches.set_count(self.nano_batches)
        jobs = [self._job(plan, bank) for plan in plans]
        if saved is not None:
            name, state = saved
            job = next(job for job in jobs if job.name == name)
            job.restore(state.progress)
            for key, buffer in job.adapter.slab.buffers().items():
                buffer.copy_(state.buffers[key])
        return SuperModel(
            run.engine, bank, run.groups, jobs, micro_batch_tokens=self.micro_batch_tokens,
            round_shape=self.shape, cut_for=partial(rank_aware_cut, run.spec),
        )  # fmt: skip

    def _job(self, plan: Plan, bank: AdapterBank) -> JobState:
        spec, run = plan.spec(), self.run
        slab = bank.new_slab(spec.lora)
        generator = torch.Generator(slab.master.device).manual_seed(plan.seed + run.groups.tp_rank)
        slab.master.normal_(0.0, run.spec.hidden_size**-0.5, generator=generator)
        train = plan.sequences(run.spec.vocab_size)
        return job_on(slab, spec, train)

    def bits(
        self, plans: Sequence[Plan], name: str, steps: int, saved: Saved | None = None
    ) -> tuple[Bits, Saved]:
        """Trains until a job has taken so many steps, those before `saved` too; what it gave."""
        model = self.super_model(plans, None if saved is None else (name, saved))
        job = next(job for job in model.jobs if job.name == name)
        losses: list[tuple[float, float]] = []
        while job.step < steps:
            for report in model.train_round():
                if report.job is job:
                    losses.append((report.outcome.loss, report.outcome.grad_norm))
        buffers = {key: value.clone() for key, value in job.adapter.slab.buffers().items()}
        return Bits(tuple(losses), _sha256(buffers)), Saved(job.progress(), buffers)


def _sha256(buffers: dict[str, torch.Tensor]) -> str:
    """Hashes the flat buffers of all ranks, in the order of ranks."""
    digest = hashlib.sha256()
    for key in sorted(buffers):
        digest.update(buffers[key].cpu().numpy().tobytes())
    found = [digest.hexdigest()]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = [""] * dist.get_world_size()
        dist.all_gather_object(found, digest.hexdigest())
    return " ".join(found)


def joined(first: Bits, second: Bits) -> Bits:
    """The bits of a job that was resumed: losses of both parts, the adapter of the last."""
    return Bits(first.losses + second.losses, second.adapter)


class Count(NamedTuple):
    """Runs that were compared with the first of their mix, and those that were equal."""

    runs: int = 0
    equal: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    unequal = sum(measure(name, args) for name in args.layouts)
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(unequal > 0)


def measure(name: str, args: argparse.Namespace) -> int:
    """Checks and times one layout; returns the number of runs that were not equal."""
    size, case = args.shape, CASES[name]
    exactness = Exactness(short_document=args.short_document, long_document=args.long_document)
    training = start(size, case, exactness, args.default)
    count = Count()
    for number, mix in enumerate(mixes(args)):
        count = check(training, mix, args.steps, f"{name}, mix {number}", count)
    say(f"{name}: {count.equal} of {count.runs} runs equal")
    if not args.rounds:
        report(args, name, count, ("", ""))
    for documents in args.documents if args.rounds else ():
        times = step_times(training, documents, args)
        say(f"{name}, {documents}: {times[0]} ms, by default {times[1]} ms")
        report(args, f"{name}, {documents}", count, times)
    training.run.close()
    return count.runs - count.equal


def mixes(args: argparse.Namespace) -> list[Mix]:
    if args.mix is not None:
        return [read_mix(args.mix)]
    return [args.shape.mix(random.Random(seed), args.steps) for seed in range(args.seeds)]


def start(size: Size, case: Case, exactness: Exactness, default: bool) -> Training:
    """Builds a layout's base model; by default, without exactness, jobs' bits must differ."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    run = SyntheticRun(size.spec(), case.layout, dtype=dtype, recompute=case.recompute)
    shape = RoundShape(exactness=None if default else exactness)
    return Training(run, shape, size.micro_batch_tokens, case.nano_batches)


def check(training: Training, mix: Mix, steps: int, where: str, count: Count) -> Count:
    """Trains a mix's watched job in all companies; adds to the count and names what differs."""
    expected = None
    for company, found in companies(training, mix, steps):
        expected = expected or found
        if company == "alone":
            continue
        is_equal = found.sha256() == expected.sha256()
        if not is_equal:
            say(f"{where}: {company} DIFFERS from alone {first_difference(expected, found)}")
        count = Count(count.runs + 1, count.equal + is_equal)
    return count


def companies(training: Training, mix: Mix, steps: int) -> list[tuple[str, Bits]]:
    """The watched job's bits in each company; the first is alone."""
    own = mix.own.name
    found = [
        (company, training.bits(plans, own, steps)[0])
        for company, plans in (
            ("alone", (mix.own,)),
            ("again", (mix.own,)),
            ("beside", mix.first()),
            ("beside, again", mix.first()),
            ("beside others", mix.second()),
        )
    ]
    first, saved = training.bits(mix.first(), own, mix.resume_at)
    second, _ = training.bits(mix.second(), own, steps, saved)
    return [*found, (f"resumed at step {mix.resume_at}", joined(first, second))]


def first_difference(expected: Bits, found: Bits) -> str:
    pairs = zip(expected.losses, found.losses, strict=True)
    for step, (one, other) in enumerate(pairs):
        if one != other:
            return f"from step {step} on: {one} and {other}"
    return "in the adapter alone"


def step_times(training: Training, documents: str, args: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds of a round with exactness and by default, medians of turns."""
    tokens = training.micro_batch_tokens
    model = training.super_model(timed_jobs(documents, tokens, args.dropout))
    shapes = (training.shape, RoundShape())
    seconds: list[list[float]] = [[], []]
    for turn in range(args.warmup + args.rounds):
        for shape, found in zip(shapes, seconds, strict=True):
            model.round_shape = shape
            wait_for_all()
            marks = Marks(on_gpu=torch.cuda.is_available())
            marks.set()
            model.train_round()
            marks.set()
            if turn >= args.warmup:
                found += marks.seconds()
    medians = largest([statistics.median(found) * 1e3 for found in seconds])
    return round(medians[0], 2), round(medians[1], 2)


def report(
    args: argparse.Namespace, layout: str, count: Count, times: tuple[float | str, float | str]
) -> None:
    row = {
        "gpu": gpu_name(), "world": int(os.environ.get("WORLD_SIZE", "1")), "commit": args.commit,
        "layout": f"{layout}{', flash-attn-4' if flash4.used_on(torch.device('cuda')) else ''}",
        "runs": count.runs, "equal": count.equal, "step_ms": times[0], "step_ms_default": times[1],
    }  # fmt: skip
    if args.csv and is_main():
        append_rows(args.csv, [row])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="8b", help="of the base model")
    add("--layers", type=int, help="in the place of the size's own")
    add("--layouts", nargs="+", choices=CASES, help="default: all for this number of processes")
    add("--seeds", type=int, default=2, help="mixes to draw")
    add("--mix", type=Path, help="file of the one mix to train, instead of drawn ones")
    add("--steps", type=int, default=6, help="of the watched job; dq shows from the third on")
    add("--documents", nargs="+", choices=DOCUMENTS, default=list(DOCUMENTS), help="to be timed")
    add("--rounds", type=int, default=12, help="timed of each kind; 0: only check")
    add("--warmup", type=int, default=3)
    add("--dropout", type=float, default=0.05, help="of the timed jobs")
    add("--short-document", type=int, default=Exactness().short_document, help="see Exactness")
    add("--long-document", type=int, default=Exactness().long_document, help="see Exactness")
    add("--default", action="store_true", help="check without exactness")
    args = parser.parse_args(argv)
    size = SIZES[args.size]
    args.shape = replace(size, layers=args.layers or size.layers)
    args.layouts = args.layouts or cases_of(int(os.environ.get("WORLD_SIZE", "1")))
    return args


if __name__ == "__main__":
    sys.exit(main())
