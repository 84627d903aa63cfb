"""Jobs with given data, ready to be trained by a super-model."""

from __future__ import annotations

from tlora_megatron.config.job import JobSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.slab import initial_factor
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.data.job_data import BatchPlan, JobData
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.job_state import JobState


def fresh_job(
    spec: JobSpec, train: tuple[TokenSequence, ...], bank: AdapterBank, model: ModelSpec
) -> JobState:
    """A job at its first step, with an initial adapter in a new slab of the bank."""
    slab = bank.new_slab(spec.lora)
    slab.load(lambda name: initial_factor(model, name, spec.lora, spec.seed))
    return JobState(
        spec=spec,
        data=JobData(train=train, eval=(), num_truncated=0, num_dropped=0),
        plan=BatchPlan.for_job(spec, len(train)),
        adapter=Adapter(name=spec.name, lora=spec.lora, slab=slab),
    )
