"""Scores tokens by a base alone, with the pass that clients' requests go through."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tlora_megatron.config.jobs import read_job
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.training.driven.requests import Request
from tlora_megatron.training.driven.state import NO_DATA, DrivenState, OpenPlan, gathered
from tlora_megatron.training.preparation import PreparedJob, start_job
from tlora_megatron.training.super_model import Engine, SuperModel

_RANK = 8
"""Of an adapter that is still 0: it changes no bit of the base."""


def score_base(
    super_model: SuperModel[Engine], spec: Backbone, tokens: Sequence[int]
) -> np.ndarray:
    """Log-probabilities of all tokens but the first, fp32; waits for the device.

    Collective over the world; the super-model must have no job.
    """
    assert not super_model.jobs, "the base is scored before jobs come"
    lora = {"rank": _RANK, "target_modules": ["q_proj"]}
    entry = {"name": "base", "driven": True, "lora": lora, "max_seq_len": len(tokens)}
    prepared = PreparedJob(
        spec=read_job(entry, None), data=NO_DATA, plan=OpenPlan(), checkpoint=None, imported=None
    )
    job = start_job(prepared, spec, super_model.bank.new_slab(prepared.spec.lora))
    assert isinstance(job, DrivenState), "it is driven"
    arrays: dict[str, np.ndarray] = {
        "lengths": np.array([len(tokens) - 1], np.int32),
        "tokens": np.array(tokens[:-1], np.int32),
        "targets": np.array(tokens[1:], np.int64),
    }
    super_model.set_jobs([job])
    try:
        job.begin(1, Request(op="forward", arrays=arrays), super_model.groups.device)
        while job.to_score:
            (job.to_score,) = super_model.forward_part([job.to_score])
        return gathered([job])[0]
    finally:
        super_model.set_jobs([])
