"""The project's modes of the end-to-end benchmark: together, one after another, and the floor."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from end_to_end_jobs import Mix

from tlora_megatron.integrations.megatron import model as backbone
from tlora_megatron.integrations.megatron.engine import MegatronEngine, current_groups, pair_linears
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.attach import attach
from tlora_megatron.layers.sites import Site, stage_sites
from tlora_megatron.layers.slab import initial_factor
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.data.job_data import BatchPlan, JobData
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.packing.packing import PackedBatch
from tlora_megatron.training.super_model import SuperModel


class Timing(NamedTuple):
    """What a mode took, over all its timed steps."""

    seconds: float
    steps: int
    tokens: int
    """Without padding."""
    peak_bytes: int


class Effort(NamedTuple):
    """How long to measure."""

    warmup: int
    rounds: int
    """Of the super-model and of the floor."""
    steps: int
    """Of each job alone, after two that warm up."""
    profile: bool = False
    """Print the kernels of one more round."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """A frozen backbone with random weights on this GPU, and what is attached to it."""

    spec: ModelSpec
    groups: ParallelGroups
    engine: MegatronEngine
    sites: Sequence[Site]
    linears: Sequence[tuple[Site, Any]]
    dtype: torch.dtype
    micro_batch_tokens: int

    @classmethod
    def build(cls, spec: ModelSpec, dtype: torch.dtype, micro_batch_tokens: int) -> Project:
        """Builds the backbone and draws its weights where it lies."""
        layout = ParallelLayout()
        backbone.initialize_parallel(layout)
        groups = current_groups(layout)
        model = backbone.build_backbone(spec, layout, dtype=dtype)
        backbone.load_backbone(model, spec, None, layout)
        sites = stage_sites(spec, layout, tp_rank=0, pp_rank=0)
        return cls(
            spec=spec,
            groups=groups,
            engine=MegatronEngine(model, groups, spec.vocab_size),
            sites=sites,
            linears=pair_linears(model, sites),
            dtype=dtype,
            micro_batch_tokens=micro_batch_tokens,
        )

    def super_model(self, mix: Mix, only: Sequence[int] | None = None) -> SuperModel:
        """Fresh jobs of a mix, all or some, attached to the backbone."""
        chosen = range(len(mix.specs)) if only is None else only
        specs = [mix.specs[index] for index in chosen]
        bank = AdapterBank(
            self.sites, [s.lora for s in specs], dtype=self.dtype, device=self.groups.device
        )
        attach(self.linears, bank)
        jobs = []
        for index, spec in zip(chosen, specs, strict=True):
            slab = bank.new_slab(spec.lora)
            slab.load(lambda name, spec=spec: initial_factor(self.spec, name, spec.lora, spec.seed))
            jobs.append(
                JobState(
                    spec=spec,
                    data=JobData(train=mix.data[index], eval=(), num_truncated=0, num_dropped=0),
                    plan=BatchPlan.for_job(spec, len(mix.data[index])),
                    adapter=Adapter(name=spec.name, lora=spec.lora, slab=slab),
                )
            )
        engine: Any = _Recorder(self.engine)
        return SuperModel(
            engine, bank, self.groups, jobs, micro_batch_tokens=self.micro_batch_tokens
        )

    def detach(self) -> None:
        """Leaves the frozen backbone alone on the GPU."""
        attach(
            self.linears, AdapterBank(self.sites, [], dtype=self.dtype, device=self.groups.device)
        )


class _Recorder:
    """An engine that keeps the micro-batches it runs."""

    nano_batches = None

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self.batches: list[PackedBatch] = []

    def forward_backward(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """See `Engine.forward_backward`."""
        self.batches += batches
        return self._engine.forward_backward(batches)


def run_super_model(project: Project, mix: Mix, effort: Effort) -> tuple[Timing, list[PackedBatch]]:
    """Whole rounds: packing, forward, backward, the steps of jobs whose batch is complete.

    Returns the micro-batches too: warm-up first, one a round.
    """
    super_model = project.super_model(mix)
    recorder: Any = super_model.engine
    timing = timed(super_model.train_round, effort.warmup, effort.rounds)
    batches = recorder.batches
    tokens = sum(map(real_tokens, batches[effort.warmup :]))
    batches = list(batches)
    if effort.profile:
        profile(super_model.train_round)
    return timing._replace(tokens=tokens), batches


def run_floor(project: Project, batches: Sequence[PackedBatch], effort: Effort) -> Timing:
    """Forward and input gradients without adapters, on the micro-batches of the rounds above."""
    project.detach()
    turns = iter(batches)
    timing = timed(
        lambda: project.engine.forward_backward([next(turns)]), effort.warmup, effort.rounds
    )
    if effort.profile:
        profile(lambda: project.engine.forward_backward([batches[0]]))
    return timing._replace(tokens=sum(map(real_tokens, batches[effort.warmup :])))


def run_sequential(project: Project, mix: Mix, effort: Effort) -> Timing:
    """Each job alone, in micro-batches of its own sequences, as many steps for each job."""
    total = Timing(0.0, 0, 0, 0)
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
        total = Timing(
            total.seconds + timing.seconds,
            total.steps + timing.steps,
            total.tokens + tokens,
            max(total.peak_bytes, timing.peak_bytes),
        )
    return total


def timed(run: Callable[[], object], warmup: int, repeats: int) -> Timing:
    """Runs back to back and waits for the device at the end; tokens are the caller's to count."""
    for _ in range(warmup):
        run()
    _synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    _synchronize()
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return Timing(seconds, repeats, 0, peak)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profile(run: Callable[[], object]) -> None:
    """Prints where the device's time goes in one call, and how long the call took the host."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        begin = time.perf_counter()
        run()
        launched = time.perf_counter() - begin
        _synchronize()
        total = time.perf_counter() - begin
    print(
        f"host {launched * 1e3:.1f} ms until it returned, {total * 1e3:.1f} ms until all was done"
    )
    print(
        trace.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=35, max_name_column_width=80
        )
    )


def real_tokens(batch: PackedBatch) -> int:
    """Rows of a micro-batch that are a job's."""
    view = batch.view
    return sum(p.length for p in view.pieces if p.document.slot != view.num_slots)


def read_spec(path: Path, layers: int | None) -> ModelSpec:
    """The model's shape, with fewer layers if asked for."""
    from tlora_megatron.model.spec import read_model_spec

    spec = read_model_spec(path)
    return spec if layers is None else dataclasses.replace(spec, num_layers=layers)
