"""Jobs with given data, ready to be trained by a super-model."""

from __future__ import annotations

from typing import Any

from tlora_megatron.config.job import JobSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.slab import initial_factor
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.data.job_data import BatchPlan, JobData
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.packing.packing import PackedBatch
from tlora_megatron.training.preference import Reference


def fresh_job(
    spec: JobSpec, train: tuple[TokenSequence, ...], bank: AdapterBank, model: ModelSpec
) -> JobState:
    """A job at its first step, with an initial adapter in a new slab of the bank."""
    slab = bank.new_slab(spec.lora)
    slab.load(lambda name: initial_factor(model, name, spec.lora, spec.seed))
    return job_on(slab, spec, train)


def job_on(slab: Any, spec: JobSpec, train: tuple[TokenSequence, ...]) -> JobState:
    """A job at its first step, whose adapter is what a slab holds; a reference of pairs is 0."""
    data = JobData(train=train, eval=(), num_truncated=0, num_dropped=0)
    return JobState(
        spec=spec,
        data=data,
        plan=BatchPlan.for_job(spec, len(train)),
        adapter=Adapter(name=spec.name, lora=spec.lora, slab=slab),
        reference=Reference.of(data) if spec.preference else None,
    )


def real_tokens(batch: PackedBatch) -> int:
    """Rows of this process's micro-batch that belong to a job."""
    view = batch.view
    return sum(p.length for p in view.pieces if p.document.slot != view.num_slots)
