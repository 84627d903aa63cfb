"""Bases of two precisions in one process, whose rounds and floors take turns."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from scripts.bench.harness.clock import Timing, allocated, timed, total
from scripts.bench.harness.kernel_table import kernel_table
from scripts.bench.harness.world import is_main
from scripts.bench.step.jobs import Mix
from scripts.bench.step.project import Project, real_tokens
from tlora_megatron.config.schema import EMBEDDING, HEAD, Recompute
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import quantised_on_reading
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.packing.packing import PackedBatch
from tlora_megatron.training.super_model import SuperModel

Precision = Literal["bf16", "fp8"]
Mode = Literal["floor", "adapters", "together"]


class Side:
    """A base of one precision, and the jobs of a mix on it.

    Args:
        spec: shape of the base; its weights are drawn, the same ones for each precision.
        tokens: rows of a micro-batch.
    """

    def __init__(
        self,
        precision: Precision,
        spec: ModelSpec,
        layout: ParallelLayout,
        *,
        recompute: Recompute,
        tokens: int,
    ) -> None:
        self.precision = precision
        self.base_bytes = self.job_bytes = 0
        before = allocated()
        quantisation = None
        if precision == "fp8":
            quantisation = quantised_on_reading(spec, (EMBEDDING, HEAD))
        run = SyntheticRun(
            spec, layout, dtype=torch.bfloat16, recompute=recompute, quantisation=quantisation
        )
        self._project = Project(run=run, micro_batch_tokens=tokens)
        self._model: SuperModel | None = None
        self._batches: list[PackedBatch] = []
        self._pieces: dict[Mode, list[Timing]] = {}
        self.base_bytes = allocated() - before

    def begin(self, mix: Mix) -> None:
        """Makes the jobs of a mix, in place of those of the last one."""
        self.end()
        with self._counting():
            self._model = self._project.super_model(mix)

    def end(self) -> None:
        """Drops jobs and timings."""
        with self._counting():
            self._model = None
            self._batches, self._pieces = [], {}
            self._project.detach()
            gc.collect()

    def measure(self, mode: Mode, warmup: int, rounds: int, beside: int) -> None:
        """Times rounds of a mode; floor and adapters run the micro-batches of the last rounds.

        Args:
            beside: bytes that are none of this side's.
        """
        with self._counting():
            run = self._prepare(mode)
            timing = timed(run, warmup, rounds)
        batches = self._batches[-rounds:]
        beside += self.job_bytes if mode == "floor" else 0
        timing = timing._replace(
            tokens=sum(map(real_tokens, batches)), peak_bytes=max(0, timing.peak_bytes - beside)
        )
        self._pieces.setdefault(mode, []).append(timing)

    def timing(self, mode: Mode) -> Timing:
        """All rounds of a mode."""
        return total(self._pieces[mode])

    def look(self, mode: Mode, title: str, file: Path) -> None:
        """Appends the kernels of one round of a mode to a file."""
        run = self._prepare(mode)
        run()
        if is_main():
            kernel_table(run, f"{title}, {self.precision} {mode}", file)
        else:
            run()

    def _prepare(self, mode: Mode) -> Any:
        """Attaches what a mode runs with; what runs one round of it."""
        assert self._model is not None, "a mix must have begun"
        model, project = self._model, self._project
        recorder: Any = model.engine
        if mode == "floor":
            project.detach()
        else:
            attach(project.run.linears, model.bank)
        if mode == "together":
            recorder.batches = self._batches = []
            return model.train_round
        turns = _endless(self._batches)
        return lambda: project.run.engine.forward_backward([next(turns)])

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Adds what jobs have come to hold."""
        before = allocated()
        yield
        self.job_bytes += allocated() - before

    @property
    def held_bytes(self) -> int:
        """All that the side's base and jobs hold between two rounds."""
        return self.base_bytes + self.job_bytes


def measure_in_turns(
    sides: Sequence[Side], mix: Mix, *, warmup: int, rounds: int, turns: int, adapters: bool
) -> None:
    """Times a mix on every side; sides and modes take turns, block by block of rounds.

    Args:
        rounds: timed in each block, behind `warmup` untimed ones.
        adapters: also forward and backward with adapters, without packing and optimizers.
    """
    modes: list[Mode] = ["together", *(["adapters"] if adapters else []), "floor"]
    for side in sides:
        side.begin(mix)
    for _ in range(turns):
        for side in sides:
            beside = sum(other.held_bytes for other in sides if other is not side)
            for mode in modes:
                side.measure(mode, warmup, rounds, beside)


def _endless(batches: Sequence[PackedBatch]) -> Iterator[PackedBatch]:
    while True:
        yield from batches
