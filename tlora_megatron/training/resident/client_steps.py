"""Optimizer steps that clients ask for, those of several jobs together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tlora_megatron.config.job import OptimizerSpec
from tlora_megatron.training.driven.requests import AdamParams, Answer
from tlora_megatron.training.driven.state import DrivenState
from tlora_megatron.training.loop import Loop
from tlora_megatron.training.optimizer import StepOutcome, StepRequest, step_adapters
from tlora_megatron.training.super_model import StepReport


class Asked(NamedTuple):
    """A step that a client has asked for."""

    job: DrivenState
    number: int
    adam: AdamParams


def step_together(loop: Loop, asked: Sequence[Asked]) -> Iterator[tuple[Asked, Answer]]:
    """Makes the steps of several jobs; waits for the device once. Collective over the world.

    A step whose gradient is not finite changes nothing, and the gradient is gone.
    """
    if not asked:
        return
    model = loop.super_model
    slots = {job.name: slot for slot, job in enumerate(model.jobs)}
    none = torch.zeros((), device=model.groups.device)
    requests = [
        StepRequest(slots[job.name], _optimizer(adam), adam.learning_rate, job.updates, none)
        for job, _, adam in asked
    ]
    exact = model.round_shape.exactness is not None
    outcomes = step_adapters(model.bank, model.groups, requests, exact=exact)
    for one, outcome in zip(asked, outcomes, strict=True):
        yield one, _note(loop, one, outcome)


def _optimizer(adam: AdamParams) -> OptimizerSpec:
    return OptimizerSpec(
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        max_grad_norm=max(0.0, adam.grad_clip_norm),
    )


def _note(loop: Loop, asked: Asked, outcome: StepOutcome) -> Answer:
    job, number, adam = asked
    if not outcome.applied:
        job.moved(number, applied=False)
        what = "weights" if outcome.loss != outcome.loss else "gradient"
        error = f"the {what} must be finite for a step; the gradient has been dropped"
        return Answer(error=error, category="user")
    loss = job.mean_loss
    job.updates += 1
    job.last_loss = loss
    tokens, targets = job.moved(number, applied=True)
    reported = StepOutcome(loss, outcome.grad_norm, True)
    loop.note_step(StepReport(job, reported, adam.learning_rate, tokens, targets, job.batch_time_s))
    job.batch_time_s = 0.0
    return Answer(metrics={"grad_norm": outcome.grad_norm}, values={"step": job.updates})
