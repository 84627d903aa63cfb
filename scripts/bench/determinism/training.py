"""Trains drawn jobs on one base model by the super-model, and hashes what they give."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from scripts.bench.determinism.cases import Plan
from scripts.bench.harness.training_jobs import job_on
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.nano.rounds import rank_aware_cut
from tlora_megatron.training.packing.packing import RoundShape
from tlora_megatron.training.super_model import SuperModel


class Saved(NamedTuple):
    """A job between two steps: what a checkpoint keeps of it on this rank."""

    progress: dict[str, Any]
    buffers: dict[str, torch.Tensor]


class Bits(NamedTuple):
    """The outcome of a job, over all ranks; equal ones are equal to the bit."""

    losses: tuple[tuple[float, float], ...]
    """Loss and gradient norm of every step."""
    adapter: str
    """sha256 of weights and moments."""

    def sha256(self) -> str:
        numbers = [x for pair in self.losses for x in pair]
        digest = hashlib.sha256(struct.pack(f"={len(numbers)}d", *numbers))
        digest.update(self.adapter.encode())
        return digest.hexdigest()


class Training:
    """Trains jobs on one base model; the rounds' shape has an `Exactness` for the promise."""

    def __init__(
        self, run: SyntheticRun, shape: RoundShape, micro_batch_tokens: int, nano_batches: int = 1
    ) -> None:
        self.run = run
        self.shape = shape
        self.micro_batch_tokens = micro_batch_tokens
        self.nano_batches = nano_batches

    def super_model(
        self, plans: Sequence[Plan], saved: tuple[str, Saved] | None = None
    ) -> SuperModel[Any]:
        """Puts jobs on the base model in the place of those before; one of them may go on."""
        run, specs = self.run, [plan.spec() for plan in plans]
        bank = AdapterBank(
            run.sites, [spec.lora for spec in specs], dtype=run.dtype, device=run.groups.device
        )
        attach(run.linears, bank)
        if self.nano_batches > 1:
            run.engine.nano_batches.set_count(self.nano_batches)
        jobs = [self._job(plan, bank) for plan in plans]
        if saved is not None:
            name, state = saved
            job = next(job for job in jobs if job.name == name)
            job.restore(state.progress)
            for key, buffer in job.adapter.slab.buffers().items():
                buffer.copy_(state.buffers[key])
        return SuperModel(
            run.engine, bank, run.groups, jobs, micro_batch_tokens=self.micro_batch_tokens,
            round_shape=self.shape, cut_for=partial(rank_aware_cut, run.spec),
        )  # fmt: skip

    def _job(self, plan: Plan, bank: AdapterBank) -> JobState:
        spec, run = plan.spec(), self.run
        slab = bank.new_slab(spec.lora)
        generator = torch.Generator(slab.master.device).manual_seed(plan.seed + run.groups.tp_rank)
        slab.master.normal_(0.0, run.spec.hidden_size**-0.5, generator=generator)
        train = plan.sequences(run.spec.vocab_size)
        return job_on(slab, spec, train)

    def bits(
        self, plans: Sequence[Plan], name: str, steps: int, saved: Saved | None = None
    ) -> tuple[Bits, Saved]:
        """Trains until a job has taken so many steps, those before `saved` too; what it gave."""
        model = self.super_model(plans, None if saved is None else (name, saved))
        job = next(job for job in model.jobs if job.name == name)
        losses: list[tuple[float, float]] = []
        while job.step < steps:
            for report in model.train_round():
                if report.job is job:
                    losses.append((report.outcome.loss, report.outcome.grad_norm))
        buffers = {key: value.clone() for key, value in job.adapter.slab.buffers().items()}
        return Bits(tuple(losses), _sha256(buffers)), Saved(job.progress(), buffers)


def _sha256(buffers: dict[str, torch.Tensor]) -> str:
    """Hashes the flat buffers of all ranks, in the order of ranks."""
    digest = hashlib.sha256()
    for key in sorted(buffers):
        digest.update(buffers[key].cpu().numpy().tobytes())
    found = [digest.hexdigest()]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = [""] * dist.get_world_size()
        dist.all_gather_object(found, digest.hexdigest())
    return " ".join(found)


def joined(first: Bits, second: Bits) -> Bits:
    """The bits of a job that was resumed: losses of both parts, the adapter of the last."""
    return Bits(first.losses + second.losses, second.adapter)
