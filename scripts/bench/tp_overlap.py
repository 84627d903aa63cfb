#!/usr/bin/env python3
"""Times a decoder whose tensor-parallel communication is hidden behind nano-batches.

    PYTHONPATH=. torchrun --standalone --nproc-per-node 4 \
        scripts/bench/tp_overlap.py [--cases 70b:8x1024:4,...] [--budget-s 500] [--csv OUT.csv]

Forward and backward of a few layers with adapters, on this project's GPTModel. `none` is the
micro-batch whole, with Megatron's own collectives; `skipped` leaves them out; what lies between is
the exposed communication, of which `hidden_share` is hidden. `staggered` mechanisms carry it
between the layers of several nano-batches, `within-linear` inside each linear. `frozen` has no
adapters; `async_tp` are PyTorch's fused operators (frozen, sequence parallel). Domino's splitting
(two halves of a batch, asynchronous NCCL all-reduces) is what staggered `nccl` with 2 does.

Every variant's input gradient is compared with that of the same step in fp32 first: one further
from it than `none` (by half) is not timed. Variants take turns round by round; a time is the median
over rounds of the slowest process. `cpu_ms` is how long the host takes to start a step: near
`step_ms`, the step waits for launches. `--graphs` times replays of CUDA graphs beside. The
controller then chooses a number by steps of its own. `--profile` records a step of a few variants
and prints where its time goes; the numbers and traces lie under --profile-out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap_async_tp import async_tp
from overlap_cases import Bench, Case, Step, Variant
from overlap_recording import profile_steps
from overlap_rows import Timer, about, append, captured, say

from tlora_megatron.integrations.megatron.model import initialize_parallel
from tlora_megatron.parallel.tensor_collectives import TensorCollectives, make_tensor_collectives
from tlora_megatron.plan import ParallelLayout
from tlora_megatron.training.nano_controller import BestCount, StepTime

RESULTS = Path(__file__).parent / "results" / "tp_overlap.csv"
CASES = tuple(
    f"{model}:{shape}:{adapters}"
    for adapters in (4, 16)
    for shape in ("8x1024", "8x2048", "16x1024")
    for model in ("70b", "8b")
)
"""The most telling first: a budget may not reach the last."""
COUNTS = (2, 3, 4)
CONTROLLER_STEPS = 60
_LEAST_ROUNDS = 5
"""That a median is of, if `--rounds` are not fewer."""
_GRAPHED = ("none", "nccl", "copy_engine", "skipped")
NONE, SKIPPED = Variant("none", 1), Variant("none", 1, skips=True)
FROZEN, FROZEN_SKIPPED = NONE._replace(frozen=True), SKIPPED._replace(frozen=True)
ASYNC_TP = Variant("async_tp", 1, frozen=True)


def variants(args: argparse.Namespace) -> list[Variant]:
    """Every way that is asked for, the references first."""
    found = [NONE, SKIPPED, FROZEN, FROZEN_SKIPPED]
    if args.one_queue:
        return found
    found += [Variant(m, n) for m in args.mechanisms for n in args.counts]
    found += [Variant(args.mechanisms[0], n, "within_linear") for n in args.counts[:1]]
    found += [Variant("skipped", n) for n in args.counts[:1]]
    if args.sequence_parallel and torch.cuda.is_available():
        found.append(ASYNC_TP)
    return found


class CaseRun:
    """All variants of one case."""

    def __init__(self, bench: Bench, args: argparse.Namespace) -> None:
        self.bench, self.args = bench, args
        self.timer = Timer(bench.device)
        self._made: dict[str, TensorCollectives] = {}
        self.steps: dict[str, Step] = {}
        self.calls: dict[str, Callable[[], None]] = {}
        self._errors: dict[bool, float] = {}
        """Of the unsplit step's gradient, frozen or not, against fp32."""
        self._exact_gradients: dict[bool, torch.Tensor] = {}
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
        for variant in variants(self.args):
            self._prepare(variant)
        self._phase("prepared")
        gc.collect()
        gc.freeze()  # as training does
        timing = time.monotonic()
        for index in range(self.args.rounds):
            if index >= _LEAST_ROUNDS and out_of_time(timing, self.args.case_s):
                break
            for key, step in self.steps.items():
                with self._installed(step):
                    self.timer.run(key, self.calls[key])
        times = self.timer.result()
        for key, step in self.steps.items():
            yield self._row(step, times, key)
        self._phase("timed")
        if self.args.profile and self.bench.device.type == "cuda":
            self._profile()
            self._phase("profiled")
        split = [key for key, step in self.steps.items() if self._may_be_chosen(step)]
        if split and not self.args.no_controller:
            fastest = min(split, key=lambda key: times[key]["step_ms"])
            yield from self._controller(self.steps[fastest].variant.mechanism, times)
            self._phase("controller")

    def _phase(self, name: str) -> None:
        say(f"{self.bench.case.label}: {name} after {time.monotonic() - self._began:.1f} s")

    def _profile(self) -> None:
        label = self.bench.case.label.replace(":", "_")
        profile_steps(
            {key: self.steps[key] for key in self.args.profile if key in self.steps},
            self._installed,
            self.timer.wait,
            layers=self.bench.spec.num_layers,
            path=self.args.profile_out / f"{label}.json",
        )

    def _may_be_chosen(self, step: Step) -> bool:
        variant = step.variant
        return variant.mechanism in self.args.mechanisms and variant.mode == "staggered"

    def _prepare(self, variant: Variant) -> None:
        """Runs a variant a few times and compares it; leaves it out where it cannot run."""
        key = f"{variant.name} {variant.count}"
        try:
            step = self.bench.step(variant, self._make)
            with self._installed(step):
                for _ in range(2):
                    step()
                self.timer.wait()
            if not variant.skips and variant.mechanism != "skipped":
                self._check(key, step)
        except Exception as error:  # any: the others are to be timed all the same
            say(f"{key}: left out, {type(error).__name__}: {error}")
            return
        self.steps[key], self.calls[key] = step, step
        if self.args.graphs and variant.mechanism in _GRAPHED and not variant.frozen:
            self._capture(key, step)

    def _capture(self, key: str, step: Step) -> None:
        try:
            with self._installed(step):
                self.calls[f"{key} graph"] = captured(step)
            self.steps[f"{key} graph"] = step
        except RuntimeError as error:
            say(f"{key}: no graph, {error}")

    def _check(self, key: str, step: Step) -> None:
        """Holds a variant to the error that rounding alone makes in the unsplit step."""
        if self.args.no_check:
            return
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
        say(f"{key}: the input's gradient is {error:.3g} off fp32's")

    def _exact(self, frozen: bool) -> torch.Tensor:
        if frozen not in self._exact_gradients:
            exact = self.bench.in_fp32(self.args.layers)
            for variant in (NONE, FROZEN):
                step = exact.step(variant, self._make)
                with step.installed():
                    step()
                self._exact_gradients[variant.frozen] = step.gradient().cpu()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return self._exact_gradients[frozen].to(self.bench.device)

    @contextlib.contextmanager
    def _installed(self, step: Step) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(step.installed())
            if step.variant.mechanism == "async_tp":
                run = self.bench.run
                stack.enter_context(async_tp(run.linears, run.groups.tp_group))
            yield

    def _make(self, mechanism: str) -> TensorCollectives:
        if mechanism not in self._made:
            self._made[mechanism] = make_collectives(mechanism, self.bench)
        return self._made[mechanism]

    def _controller(
        self, mechanism: str, times: dict[str, dict[str, float]]
    ) -> Iterator[dict[str, Any]]:
        """Lets the controller choose among the fastest mechanism's counts."""
        keys = {n: f"{mechanism} {n}" for n in (1, *self.args.counts)} | {1: "none 1"}
        controller = BestCount(limit=next(n for n in range(9, 0, -1) if n in keys))
        if any(key not in self.steps for key in keys.values()):
            return
        settled = None
        for index in range(self.args.controller_steps):
            step, timer = self.steps[keys[controller.count]], Timer(self.bench.device)
            with self._installed(step):
                timer.run("step", step)
            time_s = timer.result()["step"]["step_ms"] / 1e3
            tokens = self.bench.case.num_tokens
            controller.next_count(
                StepTime(time_s=time_s, tokens=tokens, mix_key="bench", most=max(keys))
            )
            if controller.is_settled and settled is None:
                settled = index + 1
        chosen = keys[controller.kept]
        best = min(keys.values(), key=lambda key: times[key]["step_ms"])
        ratio = times[chosen]["step_ms"] / times[best]["step_ms"]
        say(
            f"controller, {mechanism}: {controller.kept} after {settled} steps, {ratio:.3f} of the "
            f"best fixed number's time"
        )
        yield self._row(self.steps[chosen], times, chosen) | {
            "mechanism": f"controller {mechanism}",
            "nano_batches": controller.kept,
            "settled_steps": settled,
        }

    def _row(self, step: Step, times: dict[str, dict[str, float]], key: str) -> dict[str, Any]:
        case, variant, mine = self.bench.case, step.variant, times[key]
        frozen = "frozen " if variant.frozen else ""
        whole = times[f"{frozen}none 1"]["step_ms"]
        bare = times.get(f"{frozen}none skipped 1", {}).get("step_ms", float("nan"))
        exposed = whole - bare
        return about(self.bench, self.args.commit) | {
            "model": case.model,
            "tokens": f"{case.sequences}x{case.length}",
            "adapters": 0 if variant.frozen else case.adapters,
            "mechanism": variant.name,
            "nano_batches": step.parts,
            "step_ms": round(mine["step_ms"], 3),
            "no_comm_ms": round(bare, 3),
            "no_split_ms": round(whole, 3),
            "hidden_share": round((whole - mine["step_ms"]) / exposed, 3) if exposed else "",
            "cpu_ms": round(mine["cpu_ms"], 3),
            "p20_ms": round(mine["p20_ms"], 3),
            "p80_ms": round(mine["p80_ms"], 3),
            "graph": key.endswith("graph"),
            "settled_steps": "",
        }


def make_collectives(mechanism: str, bench: Bench) -> TensorCollectives:
    """By name: the package's, or those of `tp_mechanisms` on GPUs."""
    group, device = bench.run.groups.tp_group, bench.device
    max_bytes = bench.case.num_tokens * bench.spec.hidden_size * bench.dtype.itemsize
    if mechanism in ("gloo", "skipped"):
        return make_tensor_collectives(group, device, mechanism)
    from tp_mechanisms import make_mechanism

    return make_mechanism(mechanism, group, device, max_bytes)


def main() -> int:
    """Runs the cases that the budget reaches; rows are written as each ends."""
    begin = time.monotonic()
    args = arguments()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    layout = ParallelLayout.for_world(
        world, tp_size=world, pp_size=1, cp_size=1, sequence_parallel=args.sequence_parallel
    )
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
        for row in CaseRun(benches[case.model], args).run():
            if dist.get_rank() == 0:
                append(args.csv, row)
            shown = ("mechanism", "nano_batches", "step_ms", "cpu_ms", "hidden_share")
            graph = " graph" if row["graph"] else ""
            say(f"{case.label}{graph} " + " ".join(f"{name} {row[name]}" for name in shown))
    dist.destroy_process_group()
    return 0


def out_of_time(begin: float, budget_s: float) -> bool:
    """Whether the first process's clock says so."""
    answer = [time.monotonic() - begin > budget_s]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def arguments() -> argparse.Namespace:
    """The command line; on a machine without GPUs its defaults are a small trial over gloo."""
    is_cuda = torch.cuda.is_available()
    words: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=words, default=list(CASES) if is_cuda else ["tiny:4x32:2"])
    parser.add_argument(
        "--mechanisms",
        type=words,
        default=["nccl", "copy_engine", "two_shot"] if is_cuda else ["gloo"],
    )
    parser.add_argument(
        "--counts", type=lambda text: [int(n) for n in text.split(",")], default=list(COUNTS)
    )
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--layers", type=int, help="4 of 70B, 8 of 8B if not given")
    parser.add_argument("--rounds", type=int, default=9 if is_cuda else 3)
    parser.add_argument(
        "--case-s", type=float, default=8.0, help="fewer rounds, but 5, once timing takes as long"
    )
    parser.add_argument("--controller-steps", type=int, default=CONTROLLER_STEPS)
    parser.add_argument("--no-controller", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="of gradients, half the time")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--one-queue", action="store_true")
    parser.add_argument(
        "--profile",
        nargs="?",
        type=words,
        const=["none skipped 1", "none 1", "skipped 2", "copy_engine 2", "nccl 2"],
        default=[],
        help="on GPUs: record a step of these variants; others are compared with the first",
    )
    parser.add_argument("--profile-out", type=Path, default=Path("tp_overlap_profile"))
    parser.add_argument("--budget-s", type=float, default=500.0, help="no case begins after it")
    parser.add_argument("--dtype", default="bfloat16" if is_cuda else "float32")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="where git is not at hand")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
