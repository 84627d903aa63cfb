"""The project's ways to run a mix of jobs: together, one after another, and the frozen floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from scripts.bench.harness.clock import Timing, timed, total, wait_for_device
from scripts.bench.harness.training_jobs import fresh_job
from scripts.bench.harness.world import is_main
from scripts.bench.step.jobs import Mix
from tlora_megatron.config.job import JobSpec
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.packing.packing import PackedBatch
from tlora_megatron.training.super_model import SuperModel


class Effort(NamedTuple):
    """Numbers of warm-up and timed steps."""

    warmup: int
    rounds: int
    """Timed rounds of all jobs together, and of the floor."""
    steps: int
    """Timed steps of each job alone, after two that warm up."""
    profile: bool = False
    """Print the kernels of one more round."""


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
        """Returns a job at its first step."""
        return fresh_job(spec, train, bank, self.run.spec)

    def detach(self) -> None:
        """Leaves the frozen backbone alone on the device."""
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
        """Runs and keeps the micro-batches."""
        self.batches += batches
        return self._engine.forward_backward(batches)


class TogetherTimings(NamedTuple):
    """Timings of one mix over the same micro-batches, one a round."""

    together: Timing
    """Whole rounds: packing, forward, backward, the steps of jobs whose batch is complete."""
    adapters: Timing
    """Forward and backward with all adapters and their gradients; no packing, no optimizer."""
    floor: Timing
    """Forward and input gradients without any adapter."""


def run_together(project: Project, mix: Mix, effort: Effort) -> TogetherTimings:
    """Times rounds of all jobs, then their micro-batches again with and without adapters."""
    super_model = project.super_model(mix)
    recorder: Any = super_model.engine
    together = timed(super_model.train_round, effort.warmup, effort.rounds)
    batches = list(recorder.batches)
    if effort.profile:
        _print_profile(super_model.train_round)
    adapters = _run_batches(project, batches, effort)
    del super_model, recorder
    project.detach()
    floor = _run_batches(project, batches, effort)
    tokens = sum(map(real_tokens, batches[effort.warmup :]))
    return TogetherTimings(
        *(timing._replace(tokens=tokens) for timing in (together, adapters, floor))
    )


def _run_batches(project: Project, batches: Sequence[PackedBatch], effort: Effort) -> Timing:
    """Forward and backward of recorded micro-batches on whatever is attached."""
    engine, turns = project.run.engine, iter(batches)
    timing = timed(lambda: engine.forward_backward([next(turns)]), effort.warmup, effort.rounds)
    if effort.profile:
        _print_profile(lambda: engine.forward_backward([batches[0]]))
    return timing


def run_sequential(project: Project, mix: Mix, effort: Effort) -> Timing:
    """Each job alone, in micro-batches of its own sequences, the same number of steps for each."""
    timings = []
    for index in range(len(mix.specs)):
        super_model = project.super_model(mix, [index])
        recorder: Any = super_model.engine

        def step(super_model: SuperModel = super_model) -> None:
            while not super_model.train_round():
                pass

        step()
        step()
        warm = len(recorder.batches)
        timing = timed(step, 0, effort.steps)
        tokens = sum(map(real_tokens, recorder.batches[warm:]))
        timings.append(timing._replace(tokens=tokens))
    return total(timings)


def _print_profile(run: Callable[[], object]) -> None:
    """Prints where the device's time goes in one call, and how long the call took the host."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        begin = time.perf_counter()
        run()
        launched = time.perf_counter() - begin
        wait_for_device()
        whole = time.perf_counter() - begin
    if not is_main():
        return
    print(
        f"host {launched * 1e3:.1f} ms until it returned, {whole * 1e3:.1f} ms until all was done"
    )
    print(
        trace.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=35, max_name_column_width=80
        )
    )


def real_tokens(batch: PackedBatch) -> int:
    """Rows of a micro-batch that belong to a job."""
    view = batch.view
    return sum(p.length for p in view.pieces if p.document.slot != view.num_slots)
