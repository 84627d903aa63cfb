"""One optimizer step for every job whose global batch is complete.

The semantics are `torch.nn.utils.clip_grad_norm_` then `torch.optim.AdamW`, per job: own norm, own
clip, own moments and step count. A job whose loss or gradient is not finite does not move; a job
that is not asked for does not move either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from tlora_megatron.job import OptimizerSpec
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.slab import AdapterSlab
from tlora_megatron.parallel.collectives import all_reduce
from tlora_megatron.parallel.groups import ParallelGroups

_RUN = 1 << 12
"""Elements whose squares are added in fp32: the sum is then right to about 1e-6."""


class StepRequest(NamedTuple):
    """A job whose batch is complete."""

    slot: int
    spec: OptimizerSpec
    lr: float
    updates: int
    """Updates applied so far: Adam's step count before this one."""
    loss: torch.Tensor
    """fp32 `[]`: this rank's part of the batch's loss; 0 where another rank counts it."""


class StepOutcome(NamedTuple):
    """What happened to one request, the same on every rank."""

    loss: float
    grad_norm: float
    """2-norm over the whole adapter before clipping."""
    applied: bool


def step_adapters(
    bank: AdapterBank, groups: ParallelGroups, requests: Sequence[StepRequest]
) -> list[StepOutcome]:
    """Sums gradients over ranks, then updates each requested adapter; waits for the device once.

    Collectives: one all-reduce of each adapter's slab over DP and CP, one of its TP-replicated part
    over TP, one of all losses and norms over the world.
    """
    if not requests:
        return []
    grads = [bank.take_gradient(request.slot) for request in requests]
    _reduce_gradients(bank, groups, requests, grads)
    losses, norms = _losses_and_norms(bank, groups, requests, grads)
    outcomes = []
    for request, grad, loss, norm in zip(requests, grads, losses, norms, strict=True):
        applied = math.isfinite(loss) and math.isfinite(norm)
        if applied:
            _update(bank.adapters[request.slot].slab, request, grad, norm)
            bank.refresh(request.slot)
        outcomes.append(StepOutcome(loss, norm, applied))
    return outcomes


def _reduce_gradients(
    bank: AdapterBank,
    groups: ParallelGroups,
    requests: Sequence[StepRequest],
    grads: Sequence[torch.Tensor],
) -> None:
    for pending in [all_reduce(grad, groups.dp_cp_group) for grad in grads]:
        pending.wait()
    replicated = [
        grad[: bank.adapters[r.slot].slab.layout.replicated_numel]
        for r, grad in zip(requests, grads, strict=True)
    ]
    for pending in [all_reduce(part, groups.tp_group) for part in replicated if part.numel()]:
        pending.wait()


def _losses_and_norms(
    bank: AdapterBank,
    groups: ParallelGroups,
    requests: Sequence[StepRequest],
    grads: Sequence[torch.Tensor],
) -> tuple[list[float], list[float]]:
    """Whole-world losses and gradient norms, one collective and one host sync for all jobs."""
    squares = []
    for request, grad in zip(requests, grads, strict=True):
        replicated = bank.adapters[request.slot].slab.layout.replicated_numel
        counted = grad if groups.tp_rank == 0 else grad[replicated:]
        squares.append(square_sum(counted))
    stats = torch.stack([torch.stack([r.loss.double() for r in requests]), torch.stack(squares)])
    if not groups.is_first_replica:
        stats[1].zero_()
    dist.all_reduce(stats)
    losses, sums = stats.tolist()
    return losses, [math.sqrt(s) if s >= 0 else math.nan for s in sums]


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares of fp32 `[n]`, fp64 `[]`, in two reductions whatever n.

    In runs, since torch's norm on CPUs adds all squares in fp32: of 10^8 equal ones, 4 % are lost.
    """
    whole = flat.numel() // _RUN * _RUN
    runs = torch.linalg.vector_norm(flat[:whole].view(-1, _RUN), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    return runs.double().square().sum() + rest.double().square()


def _update(slab: AdapterSlab, request: StepRequest, grad: torch.Tensor, norm: float) -> None:
    spec = request.spec
    if spec.max_grad_norm > 0:
        grad.mul_(min(1.0, spec.max_grad_norm / (norm + 1e-6)))
    torch._fused_adamw_(
        [slab.master],
        [grad],
        [slab.exp_avg],
        [slab.exp_avg_sq],
        [],
        [torch.full((), request.updates + 1.0, device=grad.device)],
        amsgrad=False,
        lr=request.lr,
        beta1=spec.betas[0],
        beta2=spec.betas[1],
        weight_decay=spec.weight_decay,
        eps=spec.eps,
        maximize=False,
    )
