"""The project's ways to run a mix of jobs: together, one after another, and the frozen floor."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from scripts.bench.harness.clock import Timing, allocated, is_main, timed, total
from scripts.bench.harness.kernel_table import kernel_table
from scripts.bench.harness.training_jobs import fresh_job, real_tokens
from scripts.bench.step.jobs import Mix
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.schema import EMBEDDING, HEAD, Recompute
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import quantised_on_reading
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.packing.packing import PackedBatch
from tlora_megatron.training.super_model import SuperModel

Precision = Literal["bf16", "fp8"]
Mode = Literal["gemms", "floor", "adapters", "together"]


class Effort(NamedTuple):
    """Numbers of warm-up and timed steps."""

    warmup: int
    rounds: int
    """Timed rounds of all jobs together, and of the floor."""
    steps: int
    """Timed steps of each job alone, after two that warm up."""
    kernels: Path | None = None
    """The kernels of one more round are written there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """A frozen backbone with random weights on this process's device, and jobs attached to it."""

    run: SyntheticRun
    micro_batch_tokens: int

    def super_model(self, mix: Mix, only: Sequence[int] | None = None) -> SuperModel:
        """Fresh jobs of a mix, all or some, attached to the backbone."""
        run = self.run
        chosen = range(len(mix.specs)) if only is None else only
        loras = [mix.specs[index].lora for index in chosen]
        bank = AdapterBank(run.sites, loras, dtype=run.dtype, device=run.groups.device)
        attach(run.linears, bank)
        jobs = [self.fresh_job(mix.specs[i], mix.data[i], bank) for i in chosen]
        engine: Any = _Recorder(run.engine)
        return SuperModel(
            engine, bank, run.groups, jobs, micro_batch_tokens=self.micro_batch_tokens
        )

    def fresh_job(
        self, spec: JobSpec, train: tuple[TokenSequence, ...], bank: AdapterBank
    ) -> JobState:
        return fresh_job(spec, train, bank, self.run.spec)

    def detach(self) -> None:
        run = self.run
        attach(run.linears, AdapterBank(run.sites, [], dtype=run.dtype, device=run.groups.device))


class _Recorder:
    """An engine that keeps the micro-batches it runs."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.batches: list[PackedBatch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward_backward(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        self.batches += batches
        return self._engine.forward_backward(batches)


def run_together(project: Project, mix: Mix, effort: Effort) -> dict[Mode, Timing]:
    """Times rounds of all jobs, their micro-batches without packing, without adapters, as GEMMs."""
    super_model = project.super_model(mix)
    recorder: Any = super_model.engine
    found: dict[Mode, Timing] = {}

    def run(mode: Mode, step: Callable[[], object]) -> None:
        found[mode] = timed(step, effort.warmup, effort.rounds)
        if effort.kernels is not None:
            _look(step, f"{mix.name}, {mode}", effort.kernels)

    run("together", super_model.train_round)
    batches = list(recorder.batches)
    turns, engine = itertools.cycle(batches), project.run.engine
    run("adapters", lambda: engine.forward_backward([next(turns)]))
    del super_model, recorder
    project.detach()
    turns = itertools.cycle(batches)
    run("floor", lambda: engine.forward_backward([next(turns)]))
    if project.run.spec.experts is None:
        products = products_alone(project.run, max(b.tokens.shape[1] for b in batches))
        turns = itertools.cycle(batches)
        run("gemms", lambda: products(next(turns)))
    tokens = sum(map(real_tokens, batches[effort.warmup :][: effort.rounds]))
    return {mode: timing._replace(tokens=tokens) for mode, timing in found.items()}


def _look(step: Callable[[], object], title: str, file: Path) -> None:
    kernel_table(step, title, file) if is_main() else step()


def products_alone(run: SyntheticRun, most_rows: int) -> Callable[[PackedBatch], None]:
    """Runs the products of a dense model's forward pass and input gradients, and nothing else."""
    blocks = [module.weight for _, module in run.linears]
    head = run.engine.model.output_layer.weight
    widest = max(size for weight in (*blocks, head) for size in weight.shape)
    values = torch.randn(most_rows * widest, dtype=head.dtype, device=head.device)

    def products(batch: PackedBatch) -> None:
        rows, targets = batch.tokens.shape[1], len(batch.target_rows)
        at = lambda rows, width: values[: rows * width].view(rows, width)  # noqa: E731
        for weight in blocks:
            at(rows, weight.shape[1]) @ weight.t()
        at(targets, head.shape[1]) @ head.t()
        at(targets, head.shape[0]) @ head
        for weight in reversed(blocks):
            at(rows, weight.shape[0]) @ weight

    return products


def run_sequential(project: Project, mix: Mix, effort: Effort) -> Timing:
    """Each job alone, in micro-batches of its own sequences, the same number of steps for each."""
    timings = []
    for index in range(len(mix.specs)):
        super_model = project.super_model(mix, [index])
        recorder: Any = super_model.engine
        step = whole_step(super_model)
        step()
        step()
        warm = len(recorder.batches)
        timing = timed(step, 0, effort.steps)
        timings.append(timing._replace(tokens=sum(map(real_tokens, recorder.batches[warm:]))))
    return total(timings)


def whole_step(super_model: SuperModel) -> Callable[[], None]:
    """Runs rounds until some job has stepped."""

    def step() -> None:
        while not super_model.train_round():
            pass

    return step


class Side:
    """A base of one precision, and the jobs of a mix on it; weights are the same ones for each.

    Args:
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
        is_fp8 = precision == "fp8"
        quantisation = quantised_on_reading(spec, (EMBEDDING, HEAD)) if is_fp8 else None
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
        _look(run, f"{title}, {self.precision} {mode}", file)

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
        turns = itertools.cycle(self._batches)
        return lambda: project.run.engine.forward_backward([next(turns)])

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Adds what jobs have come to hold."""
        before = allocated()
        yield
        self.job_bytes += allocated() - before


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
            others = (other for other in sides if other is not side)
            beside = sum(other.base_bytes + other.job_bytes for other in others)
            for mode in modes:
                side.measure(mode, warmup, rounds, beside)
