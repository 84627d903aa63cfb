"""Jobs that are saved without a model: adapters of random values, and what writes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.helpers.layout_sites import SPEC, sites_of_ranks
from tests.helpers.tiny_models import random_factors
from tlora_megatron.config.job import DataSpec, JobSpec, LoraSpec
from tlora_megatron.layers.adapter_bank import Adapter
from tlora_megatron.layers.slab import AdapterSlab
from tlora_megatron.layers.slab.layout import slab_layout
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.saving.saver import Saver, Target, adapter_target, checkpoint_target

CPU = torch.device("cpu")
BUFFERS = ("master", "exp_avg", "exp_avg_sq")


def lone_groups(device: torch.device = CPU) -> Any:
    """The groups of a run of one process, without a process group."""
    return SimpleNamespace(
        layout=ParallelLayout(),
        device=device,
        is_writer=True,
        is_first_replica=True,
        model_group=None,  # one rank gathers nothing
    )


def make_job(name: str, *, rank: int = 4, device: torch.device = CPU) -> JobState:
    """A job with an adapter of random weights and moments."""
    lora = LoraSpec(rank=rank, alpha=rank)
    slab = AdapterSlab(slab_layout(sites_of_ranks(SPEC, 1)[0], lora), device)
    for seed, buffer in enumerate(BUFFERS):
        slab.load(random_factors(SPEC, lora, seed=seed + 10 * rank).__getitem__, buffer)
    data: Any = SimpleNamespace(train=(), fingerprint="none")
    plan: Any = SimpleNamespace(num_steps=10)
    spec = JobSpec(name=name, data=DataSpec(train="unused.jsonl"), lora=lora, max_steps=10)
    adapter = Adapter(name=name, lora=lora, slab=slab)
    return JobState(spec=spec, data=data, plan=plan, adapter=adapter)


def make_saver(*jobs: JobState, memory_gb: float | None = None) -> Saver:
    groups = lone_groups(jobs[0].adapter.slab.master.device)
    return Saver(jobs, SPEC, groups, memory_gb)


def checkpoint(folder: Path, job: JobState, errors: list[Exception] | None = None) -> Target:
    found = [] if errors is None else errors
    return checkpoint_target(folder / job.name / "checkpoints", job, found.append)


def adapter(folder: Path, job: JobState, errors: list[Exception] | None = None) -> Target:
    found = [] if errors is None else errors
    return adapter_target(folder / job.name / "adapter", "base", found.append)


def whole_values(job: JobState, buffer: str) -> dict[str, torch.Tensor]:
    """Whole canonical tensors of an adapter as it is now."""
    slab = job.adapter.slab
    views = slab.layout.views(slab.buffers()[buffer].cpu())
    return {
        f.name: (v if f.which == "lora_a" else v.t()).clone()
        for f, v in zip(slab.layout.factors, views, strict=True)
    }
