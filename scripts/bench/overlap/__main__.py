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
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from scripts.bench.harness.arguments import RESULTS, bench_parser
from scripts.bench.harness.clock import out_of_time, release, say, wait_for_all
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.overlap.cases import (
    FROZEN,
    FROZEN_SKIPPED,
    NONE,
    SKIPPED,
    Bench,
    Case,
    Step,
    Variant,
)
from tlora_megatron.integrations.megatron.process_groups import initialize_parallel
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.parallel.collectives import (
    Kind,
    TensorCollectives,
    make_tensor_collectives,
)
from tlora_megatron.training.nano.controller import HysteresisController, StepTime


class GradientCheck:
    """Holds one case's variants to the error that rounding alone makes in the unsplit step."""

    def __init__(
        self, bench: Bench, layers: int | None, make: Callable[[str], TensorCollectives]
    ) -> None:
        self._bench, self._layers, self._make = bench, layers, make
        self._errors: dict[bool, float] = {}
        """Error of the unsplit step's gradient against fp32, frozen or not."""
        self._exact_gradients: dict[bool, torch.Tensor] = {}

    def error(self, step: Step) -> float:
        """Relative distance of the input's gradient from fp32's, for a step that has run.

        It is refused if it is half as far again as the unsplit step's, which must come first.
        """
        frozen = step.variant.frozen
        expected = self._exact(frozen)
        actual = step.gradient().float()
        error = ((actual - expected).norm() / expected.norm()).item()
        allowed = max(1.5 * self._errors.setdefault(frozen, error), 1e-5)
        if not error <= allowed:
            raise ArithmeticError(
                f"the input's gradient is {error:.3g} off fp32's, of which rounding is "
                f"{self._errors[frozen]:.3g}"
            )
        return error

    def _exact(self, frozen: bool) -> torch.Tensor:
        if frozen not in self._exact_gradients:
            exact = self._bench.in_fp32(self._layers)
            for variant in (NONE, FROZEN):
                step = exact.step(variant, self._make)
                with step.installed():
                    step()
                self._exact_gradients[variant.frozen] = step.gradient().cpu()
            release()
        return self._exact_gradients[frozen].to(self._bench.device)


_LEAST_ROUNDS = 5
"""That a median is of, if `--rounds` are not fewer."""


class CaseRun:
    """All variants of one case."""

    def __init__(self, bench: Bench, variants: Sequence[Variant], args: argparse.Namespace) -> None:
        self.bench, self.args = bench, args
        self._variants = variants
        self.timer = Timer(bench.device)
        self._made: dict[str, TensorCollectives] = {}
        self.steps: dict[str, Step] = {}
        self._check = GradientCheck(bench, args.layers, self._make)
        self._began = time.monotonic()

    def run(self) -> Iterator[dict[str, Any]]:
        """Checks, times and lets the controller choose; yields rows."""
        try:
            yield from self._rows()
        finally:
            gc.unfreeze()
            self.bench.forget_overlaps()
            for made in self._made.values():
                made.close()

    def _rows(self) -> Iterator[dict[str, Any]]:
        for variant in self._variants:
            self._prepare(variant)
        self._phase("prepared")
        gc.collect()
        gc.freeze()  # as training does
        timing = time.monotonic()
        for index in range(self.args.rounds):
            if index >= _LEAST_ROUNDS and out_of_time(timing, self.args.case_s):
                break
            keys = list(self.steps)
            random.Random(index).shuffle(keys)  # alike on all processes
            for key in keys:
                with self.steps[key].installed():
                    self.timer.run(key, self.steps[key])
        times = self.timer.result()
        for key, step in self.steps.items():
            yield row(self.bench, step, times, key, self.args.commit)
        self._phase("timed")
        asked = {Variant(m, n) for m in self.args.mechanisms for n in self.args.counts}
        split = [key for key, step in self.steps.items() if step.variant in asked]
        if split and not self.args.no_controller:
            fastest = min(split, key=lambda key: times[key]["step_ms"])
            yield from self._controller(self.steps[fastest].variant.mechanism, times)
            self._phase("controller")

    def _phase(self, name: str) -> None:
        say(f"{self.bench.case.label}: {name} after {time.monotonic() - self._began:.1f} s")

    def _prepare(self, variant: Variant) -> None:
        """Runs a variant a few times and compares it; leaves it out where it cannot run."""
        key = f"{variant.name} {variant.count}"
        try:
            step = self.bench.step(variant, self._make)
            with step.installed():
                for _ in range(2):
                    step()
                wait_for_all()
            if not (self.args.no_check or variant.skips):
                off = self._check.error(step)
                say(f"{key}: the input's gradient is {off:.3g} off fp32's")
        except Exception as error:  # any: the others are to be timed all the same
            say(f"{key}: left out, {type(error).__name__}: {error}")
            return
        self.steps[key] = step

    def _make(self, mechanism: str) -> TensorCollectives:
        if mechanism not in self._made:
            bench, kind = self.bench, cast(Kind, mechanism)
            max_bytes = bench.case.num_tokens * bench.spec.hidden_size * bench.dtype.itemsize
            made = make_tensor_collectives(
                bench.run.groups.tp_group, bench.device, kind, max_bytes=max_bytes
            )
            made.prepare(2)
            self._made[mechanism] = made
        return self._made[mechanism]

    def _controller(
        self, mechanism: str, times: dict[str, dict[str, float]]
    ) -> Iterator[dict[str, Any]]:
        """Lets the controller choose among the fastest mechanism's counts."""
        keys = {n: f"{mechanism} {n}" for n in (1, *self.args.counts)} | {1: "none 1"}
        controller = HysteresisController(limit=next(n for n in range(9, 0, -1) if n in keys))
        if any(key not in self.steps for key in keys.values()):
            return
        settled = None
        for index in range(self.args.controller_steps):
            step, timer = self.steps[keys[controller.count]], Timer(self.bench.device, before=0)
            with step.installed():
                timer.run("step", step)
            time_s = timer.result()["step"]["step_ms"] / 1e3
            tokens = self.bench.case.num_tokens
            controller.next_count(
                StepTime(time_s=time_s, tokens=tokens, mix_key="bench", most=max(keys))
            )
            if controller.phase != "explore" and settled is None:
                settled = index + 1
        chosen = keys[controller.kept]
        best = min(keys.values(), key=lambda key: times[key]["step_ms"])
        ratio = times[chosen]["step_ms"] / times[best]["step_ms"]
        say(
            f"controller, {mechanism}: {controller.kept} after {settled} steps, {ratio:.3f} of the "
            f"best fixed number's time"
        )
        yield row(self.bench, self.steps[chosen], times, chosen, self.args.commit) | {
            "mechanism": f"controller {mechanism}",
            "nano_batches": controller.kept,
            "settled_steps": settled,
        }


class Timer:
    """Milliseconds of the steps of one case, and of the host's part in them.

    Args:
        before: steps that run untimed first. GPUs at their power limit clock by what they did a
            moment ago: another variant, with more or fewer waits.
        in_a_row: steps that are timed together, as a run has them: a round trip to the device is
            shared.
    """

    def __init__(self, device: torch.device, *, before: int = 1, in_a_row: int = 3) -> None:
        self.device = device
        self._before, self._in_a_row = before, in_a_row
        self.samples: dict[str, list[tuple[float, ...]]] = {}

    def run(self, key: str, call: Callable[[], None]) -> None:
        """Times a few calls in a row and keeps the sample under a key."""
        for _ in range(self._before):
            call()
        wait_for_all()
        begin = time.perf_counter()
        for _ in range(self._in_a_row):
            call()
        started = time.perf_counter()
        wait_for_all()
        ended = time.perf_counter()
        pair = tuple((t - begin) * 1e3 / self._in_a_row for t in (ended, started))
        self.samples.setdefault(key, []).append(pair)

    def result(self) -> dict[str, dict[str, float]]:
        """Medians of the slowest process's times, by key."""
        found = {}
        for key, pairs in self.samples.items():
            slowest = torch.tensor(pairs, dtype=torch.float64, device=self.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            steps, host = (sorted(column) for column in slowest.t().tolist())
            found[key] = {
                "step_ms": statistics.median(steps),
                "p20_ms": steps[len(steps) // 5],
                "p80_ms": steps[-1 - len(steps) // 5],
                "cpu_ms": statistics.median(host),
            }
        return found


def row(
    bench: Bench, step: Step, times: Mapping[str, Mapping[str, float]], key: str, commit: str
) -> dict[str, Any]:
    """The row of the variant `key`, beside the times of all variants of the case, by key."""
    case, variant, mine = bench.case, step.variant, times[key]
    frozen = "frozen " if variant.frozen else ""
    whole = times[f"{frozen}none 1"]["step_ms"]
    bare = times.get(f"{frozen}none skipped 1", {}).get("step_ms", float("nan"))
    exposed = whole - bare
    times_ms = {name: round(value, 3) for name, value in mine.items()}
    return {
        "gpu": gpu_name(), "world": dist.get_world_size(), "commit": commit, "model": case.model,
        "tokens": f"{case.sequences}x{case.length}",
        "adapters": 0 if variant.frozen else case.adapters, "mechanism": variant.name,
        "nano_batches": step.parts, "step_ms": times_ms["step_ms"], "no_comm_ms": round(bare, 3),
        "no_split_ms": round(whole, 3),
        "hidden_share": round((whole - mine["step_ms"]) / exposed, 3) if exposed else "",
        "cpu_ms": times_ms["cpu_ms"], "p20_ms": times_ms["p20_ms"], "p80_ms": times_ms["p80_ms"],
        "layers": bench.spec.num_layers, "sequence_parallel": bench.layout.sequence_parallel,
        "graph": False, "settled_steps": "",
        "links": "no P2P" if os.environ.get("NCCL_P2P_DISABLE") == "1" else "P2P",
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        "torch": torch.__version__,
    }  # fmt: skip


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
    return found + [Variant("nccl", n, skips=True) for n in args.counts[:1] if not args.brief]


def main() -> int:
    """Runs the cases that the budget reaches; rows are written as each ends."""
    begin = time.monotonic()
    args = arguments()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    layout = ParallelLayout(tp_size=world, sequence_parallel=args.sequence_parallel)
    layout = layout.for_world(world)
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
