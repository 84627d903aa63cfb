"""Rounds on the GPUs at hand: what each takes, and what was predicted."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.harness.clock import peak_bytes, wait_for_all
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.harness.world import is_main, largest, say, summed
from scripts.bench.planner.cases import model_spec
from scripts.bench.rounds.mixes import Lengths, with_documents
from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.packing.recompute_cut import round_ends_ps
from tlora_megatron.training.round_timing import RoundDepth, RoundTiming
from tlora_megatron.training.super_model import SuperModel

LEAST_GAIN, MOST_ERROR = 0.15, 0.05
"""Musts: share of the time that is saved, and median error of a predicted round."""
_DEPTHS: dict[str, RoundDepth] = {"tokens": 1, "time 2": 2, "time 4": 4, "auto": "auto"}
_WARM_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """All rounds of one mode."""

    rounds_s: list[float]
    """From the moment all processes begin a round to the one in which all have ended it."""
    predicted_s: list[float]
    busy_s: float
    """Time in which this process's device computed, forward and backward."""
    slowest_s: float
    """The sum of the longest of any process, by round."""
    losses: dict[str, list[float]]
    depth: int

    @property
    def total_s(self) -> float:
        """Time of all rounds."""
        return sum(self.rounds_s)


class Bench:
    """One base model, on which the modes train the same jobs one after another."""

    def __init__(
        self, args: argparse.Namespace, mix: Lengths, rate: ReplicaRate, run: SyntheticRun
    ) -> None:
        self._args, self._rate, self._run = args, rate, run
        self._world = run.groups.layout.dp_size
        self._loads = [
            JobLoad(
                name=name, rank=16, batch_size=64, lengths=LengthHistogram.from_lengths(lengths)
            )
            for name, lengths in mix.items()
        ]

    def warm_up(self) -> None:
        """Runs rounds that are not counted: kernels are loaded, memory is reserved."""
        model = self._model("tokens")
        for _ in range(_WARM_ROUNDS):
            model.train_round()

    def measure(self, mode: str) -> Measured:
        """Trains the first batches of every job."""
        model = self._model(mode)
        times = _Times()
        run_round = model.engine.forward_backward
        model.engine.forward_backward = times.around(run_round)
        rounds_s, predicted_s = [], []
        losses: dict[str, list[float]] = {}
        depth = 1 if model.rule is None else model.rule.depth
        try:
            while model.jobs:
                wait_for_all()
                begin = time.perf_counter()
                reports = model.train_round()
                wait_for_all()
                rounds_s.append(time.perf_counter() - begin)
                assert model.round is not None, "a round has been packed"
                rates = [self._rate] * self._world
                predicted_s.append(max(round_ends_ps(model.round, rates)) * 1e-12)
                for report in reports:
                    losses.setdefault(report.job.name, []).append(report.outcome.loss)
                left = [job for job in model.jobs if job.step < self._args.steps]
                if len(left) < len(model.jobs):
                    model.set_jobs(left)
        finally:
            model.engine.forward_backward = run_round
        own_s = times.seconds()
        return Measured(
            rounds_s=largest(rounds_s),
            predicted_s=predicted_s,
            busy_s=summed([sum(own_s)])[0],
            slowest_s=sum(largest(own_s)),
            losses=losses,
            depth=depth,
        )

    def _model(self, mode: str) -> SuperModel[Any]:
        torch.manual_seed(0)  # adapters of all modes begin alike
        timing = RoundTiming(
            rates=(self._rate,) * self._world,
            stages=(1,) * self._world,
            depth=_DEPTHS[mode],
            source=f"the profile {self._args.hardware.stem}",
        )
        return self._run.super_model(self._loads, self._args.budget, timing=timing)


class _Times:
    """Marks around calls: of the device where there is one, else of the host's clock."""

    def __init__(self) -> None:
        self._marks: list[tuple[Any, Any]] = []

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any) -> Any:
            begin = self._mark()
            found = call(*args)
            self._marks.append((begin, self._mark()))
            return found

        return marked

    def seconds(self) -> list[float]:
        """Seconds of each call, once the device has done all its work."""
        if torch.cuda.is_available():
            return [begin.elapsed_time(end) / 1e3 for begin, end in self._marks]
        return [end - begin for begin, end in self._marks]

    def _mark(self) -> Any:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def measure(args: argparse.Namespace, rate_of: Callable[..., ReplicaRate]) -> int:
    """Trains every mode, prints and writes what it took; 1 = a must was missed."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    mix = {
        name: [min(rows, args.budget) for rows in lengths]
        for name, lengths in with_documents(args.share, args.budget).items()
    }
    rate = rate_of(
        mix, args.budget, "full", model=args.model, layers=args.layers, profile=args.hardware
    )
    run = SyntheticRun(
        replace(model_spec(args.model), num_layers=args.layers),
        ParallelLayout(dp_size=world),
        dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
        recompute="full",
    )
    bench = Bench(args, mix, rate, run)
    begin = time.perf_counter()
    bench.warm_up()
    say(f"warm after {time.perf_counter() - begin:.0f} s; speed of a replica: {rate}")
    results = {mode: _measured(args, bench, mode, world) for mode in args.modes}
    met = _judge(results)
    dist.destroy_process_group()
    return 0 if met or not torch.cuda.is_available() else 1


def _measured(args: argparse.Namespace, bench: Bench, mode: str, world: int) -> Measured:
    """Measures a mode and writes its row at once."""
    from scripts.bench.rounds.__main__ import row_of

    found = bench.measure(mode)
    share = found.busy_s / (world * found.slowest_s)
    say(
        f"{mode} (depth {found.depth}): {found.total_s:.2f} s in {len(found.rounds_s)} rounds, "
        f"predicted {sum(found.predicted_s):.2f} s; devices busy {share:.1%}; peak "
        f"{peak_bytes() / 2**30:.0f} GiB"
    )
    pairs = zip(found.rounds_s, found.predicted_s, strict=True)
    say("    " + " ".join(f"{own:.2f}/{predicted:.2f}" for own, predicted in pairs))
    if is_main() and args.csv:
        name = f"lognormals, {100 * args.share:g} % of {args.budget}"
        row = row_of(gpu_name(), world, args.commit, name, args.budget, "full", mode)
        row["layout"] = row["layout"].replace("8b", f"{args.model}/{args.layers}")
        row |= {
            "step_s": round(found.total_s / args.steps, 4),
            "busy_share": round(share, 4),
            "predicted_s": round(sum(found.predicted_s) / args.steps, 4),
        }
        append_rows(args.csv, [row])
    return found


def _judge(results: dict[str, Measured]) -> bool:
    """Says what the modes save over the first, and whether predictions hold."""
    modes = list(results)
    first, met = results[modes[0]], True
    for mode in modes[1:]:
        found = results[mode]
        gain = 1 - found.total_s / first.total_s
        met &= gain >= LEAST_GAIN
        apart = max(
            abs(a - b) / abs(a)
            for name, losses in first.losses.items()
            for a, b in zip(losses, found.losses[name], strict=True)
        )
        say(f"{mode}: {gain:.1%} less time than {modes[0]} (must {LEAST_GAIN:.0%}); losses differ "
            f"by {apart:.1e} at most")  # fmt: skip
    errors = [_error(own, told) for r in results.values() for own, told in
              zip(r.rounds_s, r.predicted_s, strict=True)]  # fmt: skip
    median = statistics.median(errors)
    say(f"predicted rounds are off by {median:.1%} in the median (must {MOST_ERROR:.0%}), "
        f"{max(errors):.1%} at most")  # fmt: skip
    return met and median <= MOST_ERROR


def _error(measured_s: float, predicted_s: float) -> float:
    return abs(predicted_s / measured_s - 1)
