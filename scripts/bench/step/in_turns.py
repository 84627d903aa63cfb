"""Measures bases of several precisions in turns, mix by mix, and writes rows as they come."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from scripts.bench.harness.clock import Timing
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.harness.world import is_main, say
from scripts.bench.step.jobs import Mix
from scripts.bench.step.precision_rows import PrecisionRow, show
from scripts.bench.step.precisions import Mode, Precision, Side, measure_in_turns
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec


class PrecisionBench:
    """Bases of all precisions asked for, on one GPU or one group of them."""

    def __init__(self, args: argparse.Namespace, spec: ModelSpec, layout: ParallelLayout) -> None:
        self.args = args
        self.rows: list[PrecisionRow] = []
        self._layout = layout
        self._sides = [
            Side(precision, spec, layout, recompute=args.recompute, tokens=args.tokens)
            for precision in args.precisions
        ]

    def run(self, mixes: Sequence[Mix]) -> None:
        """Times all mixes; with `--kernels` also writes what one more round launches."""
        args = self.args
        rounds = max(1, args.rounds // args.turns)
        for mix in mixes:
            measure_in_turns(
                self._sides,
                mix,
                warmup=args.warmup,
                rounds=rounds,
                turns=args.turns,
                adapters="adapters" in args.modes,
            )
            for side in self._sides:
                self._add_side(side, f"{len(mix.specs)} ({mix.name})")
            if args.kernels:
                self._look(mix)

    def _add_side(self, side: Side, jobs: str) -> None:
        floor_s = _step_s(side.timing("floor"))
        modes: list[Mode] = ["floor", "adapters", "together"]
        for mode in modes:
            if mode in self.args.modes:
                self.add(mode, side.precision, jobs, side.timing(mode), floor_s)

    def _look(self, mix: Mix) -> None:
        for side in self._sides:
            for mode in ("together", "floor"):
                side.look(mode, mix.name, self.args.kernels)

    def release(self) -> None:
        """Drops all bases; the caller empties the allocator's cache."""
        for side in self._sides:
            side.end()
        self._sides = []

    def add(
        self,
        mode: str,
        precision: Precision,
        jobs: str,
        timing: Timing,
        floor_s: float | None = None,
    ) -> None:
        """Prints a row, and appends it to the CSV."""
        row = PrecisionRow(
            gpu=self._gpus(),
            commit=self.args.commit,
            model=self.args.model.stem,
            jobs=jobs,
            mode=mode,
            precision=precision,
            step_ms=round(_step_s(timing) * 1e3, 2),
            floor_ms="" if floor_s is None else round(floor_s * 1e3, 2),
            tokens=round(timing.tokens / timing.steps),
            tokens_per_s=round(timing.tokens / timing.seconds, 1),
            peak_bytes=timing.peak_bytes,
        )
        self.rows.append(row)
        say(show(row))
        if self.args.csv and is_main():
            append_rows(self.args.csv, [asdict(row)])

    def _gpus(self) -> str:
        size = self._layout.tp_size
        if size == 1:
            return gpu_name()
        layout = f"TP{size}" + (" SP" if self._layout.sequence_parallel else "")
        return f"{size} x {gpu_name()}, {layout}"


def _step_s(timing: Timing) -> float:
    return timing.seconds / timing.steps
