"""One case: its variants are checked, timed, and chosen among by the controller."""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scripts.bench.harness.clock import wait_for_all
from scripts.bench.harness.world import out_of_time, say
from scripts.bench.overlap.cases import Bench, Step, Variant
from scripts.bench.overlap.check import GradientCheck
from scripts.bench.overlap.rows import Timer, captured, row
from tlora_megatron.parallel.tensor_collectives import (
    TensorCollectives,
    make_tensor_collectives,
)
from tlora_megatron.training.nano.controller import HysteresisController, StepTime

_LEAST_ROUNDS = 5
"""That a median is of, if `--rounds` are not fewer."""
_GRAPHED = ("none", "nccl", "copy_engine", "skipped")


class CaseRun:
    """All variants of one case."""

    def __init__(self, bench: Bench, variants: Sequence[Variant], args: argparse.Namespace) -> None:
        self.bench, self.args = bench, args
        self._variants = variants
        self.timer = Timer(bench.device)
        self._made: dict[str, TensorCollectives] = {}
        self.steps: dict[str, Step] = {}
        self.calls: dict[str, Callable[[], None]] = {}
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
                    self.timer.run(key, self.calls[key])
        times = self.timer.result()
        for key, step in self.steps.items():
            yield row(self.bench, step, times, key, self.args.commit)
        self._phase("timed")
        split = [k for k, s in self.steps.items() if s.variant.mechanism in self.args.mechanisms]
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
            if not (self.args.no_check or variant.skips or variant.mechanism == "skipped"):
                off = self._check.error(step)
                say(f"{key}: the input's gradient is {off:.3g} off fp32's")
        except Exception as error:  # any: the others are to be timed all the same
            say(f"{key}: left out, {type(error).__name__}: {error}")
            return
        self.steps[key], self.calls[key] = step, step
        if self.args.graphs and variant.mechanism in _GRAPHED and not variant.frozen:
            self._capture(key, step)

    def _capture(self, key: str, step: Step) -> None:
        try:
            with step.installed():
                self.calls[f"{key} graph"] = captured(step)
            self.steps[f"{key} graph"] = step
        except RuntimeError as error:
            say(f"{key}: no graph, {error}")

    def _make(self, mechanism: str) -> TensorCollectives:
        if mechanism not in self._made:
            self._made[mechanism] = make_collectives(mechanism, self.bench)
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
            if controller.is_settled and settled is None:
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


def make_collectives(mechanism: str, bench: Bench) -> TensorCollectives:
    """Collectives by name: the package's, or on GPUs one of `mechanisms.MECHANISMS`."""
    group, device = bench.run.groups.tp_group, bench.device
    max_bytes = bench.case.num_tokens * bench.spec.hidden_size * bench.dtype.itemsize
    if mechanism in ("gloo", "skipped"):
        return make_tensor_collectives(group, device, mechanism)
    from scripts.bench.overlap.mechanisms import make_mechanism

    return make_mechanism(mechanism, group, device, max_bytes)
