"""One optimizer step for every job whose global batch is complete.

The semantics are `torch.nn.utils.clip_grad_norm_` then `torch.optim.AdamW`, per job: own norm, own
clip, own moments and step count. A job whose loss, gradient or weights are not finite does not
move; a job that is not asked for does not move either. Replicas that hold slices of the master
weights and moments update these: elementwise, so with the bits of the whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.config.job import OptimizerSpec
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.slab import AdapterSlab, StatePlacement
from tlora_megatron.layers.slab_cells import SlabCells
from tlora_megatron.ops.adamw import AdamUpdate, fused_adamw
from tlora_megatron.parallel.collectives import all_reduce
from tlora_megatron.parallel.groups import ParallelGroups

_RUN = 1 << 12
"""Elements whose squares are added in fp32: the sum is then right to about 1e-6."""
_PHASE = 16
"""Bytes that a reduction loads at once."""


class StepRequest(NamedTuple):
    """A job whose batch is complete."""

    slot: int
    spec: OptimizerSpec
    lr: float
    updates: int
    """Updates applied so far: Adam's step count before this one."""
    loss: Tensor
    """fp32 `[]`: this rank's part of the batch's loss; 0 where another rank counts it."""


class StepOutcome(NamedTuple):
    """Outcome of one request, the same on every rank."""

    loss: float
    """NaN where the weights were not finite before the step."""
    grad_norm: float
    """2-norm over the whole adapter before clipping."""
    applied: bool


def step_adapters(
    bank: AdapterBank,
    groups: ParallelGroups,
    requests: Sequence[StepRequest],
    *,
    exact: bool = False,
) -> list[StepOutcome]:
    """Sums gradients over ranks, then updates each requested adapter; waits for the device once.

    The gradients of all requested adapters are zero afterwards.

    Args:
        exact: losses and norms are added in the order of ranks.

    Collectives: one all-reduce of each adapter's gradient over DP and CP, one of its TP-replicated
    part over TP (unlike replicas: those of `SlabCells`); the same two of its part on routed experts
    over the ranks that hold these; one of all losses and norms over the world; where replicas hold
    slices of the state, an all-gather of the new weights in the compute dtype.
    """
    if not requests:
        return []
    slabs = [bank.adapters[request.slot].slab for request in requests]
    for slab in slabs:
        slab.collect_grad()
    _reduce_gradients(groups, slabs)
    losses, norms = _losses_and_norms(bank, groups, requests, exact=exact)
    outcomes, updates = [], []
    for request, slab, loss, norm in zip(requests, slabs, losses, norms, strict=True):
        applied = math.isfinite(loss) and math.isfinite(norm)
        if applied:
            updates.append(_update(slab, request, norm))
        outcomes.append(StepOutcome(loss, norm, applied))
    fused_adamw([update for update in updates if update.master.numel()])
    for slab, outcome in zip(slabs, outcomes, strict=True):
        # Updates zero what they read. A batch's gradient is used up with its step in any case.
        if not outcome.applied or slab.placement != StatePlacement():
            slab.grad.zero_()
    for request, outcome in zip(requests, outcomes, strict=True):
        if outcome.applied:
            bank.refresh(request.slot)
    return outcomes


def _reduce_gradients(groups: ParallelGroups, slabs: Sequence[AdapterSlab]) -> None:
    if groups.cells is not None:
        # One after the other: a process in the groups of several cells enters them in one order.
        for slab in slabs:
            cells = slab.cells or SlabCells(slab.layout, groups.cells)
            slab.cells = cells
            cells.sum_over_replicas(slab.grad, groups.tp_group)
        return
    dense = [slab.grad[: slab.layout.experts_begin] for slab in slabs]
    replicated = [slab.grad[: slab.layout.replicated_numel] for slab in slabs]
    _sum_over(groups.dp_cp_group, dense)
    _sum_over(groups.tp_group, replicated)
    if groups.experts is not None:
        _sum_over(groups.experts.dp_group, [_of_experts(slab) for slab in slabs])
        replicated = [_of_experts(slab)[: slab.layout.experts_replicated] for slab in slabs]
        _sum_over(groups.experts.tp_group, replicated)


def _sum_over(group: dist.ProcessGroup, parts: Sequence[Tensor]) -> None:
    for pending in [all_reduce(part, group) for part in parts if part.numel()]:
        pending.wait()


def _of_experts(slab: AdapterSlab) -> Tensor:
    """The gradient of a slab's factors on routed experts."""
    return slab.grad[slab.layout.experts_begin :]


def _counted(groups: ParallelGroups, slab: AdapterSlab) -> list[Tensor]:
    """The parts of a summed gradient that this rank counts, so that the world counts each once."""
    layout, parts = slab.layout, []
    if groups.is_first_replica:
        begin = 0 if groups.tp_rank == 0 else layout.replicated_numel
        parts.append(slab.grad[begin : layout.experts_begin])
    if groups.experts is not None and groups.experts.dp_rank == 0:
        begin = 0 if groups.experts.place.tp_rank == 0 else layout.experts_replicated
        parts.append(_of_experts(slab)[begin:])
    return [part for part in parts if part.numel()]


def _losses_and_norms(
    bank: AdapterBank, groups: ParallelGroups, requests: Sequence[StepRequest], *, exact: bool
) -> tuple[list[float], list[float]]:
    """Whole-world losses and gradient norms, one collective and one host sync for all jobs."""
    losses, squares = [], []
    for request in requests:
        slab = bank.adapters[request.slot].slab
        losses.append((request.loss + bank.defects[request.slot]).double())
        zero = torch.zeros((), dtype=torch.float64, device=slab.grad.device)
        squares.append(sum((square_sum(part) for part in _counted(groups, slab)), zero))
    stats = torch.stack([torch.stack(losses), torch.stack(squares)])
    totals, sums = _world_sum(stats, exact=exact).tolist()
    return totals, [math.sqrt(s) if s >= 0 else math.nan for s in sums]


def _world_sum(stats: Tensor, *, exact: bool) -> Tensor:
    """Sums over the world; exact: in the order of ranks.

    Beyond two ranks a ring's order follows from a value's place, so from who steps beside a job.
    """
    if not exact:
        dist.all_reduce(stats)
        return stats
    everyone = [torch.empty_like(stats) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, stats)
    return functools.reduce(torch.add, everyone)


def square_sum(flat: Tensor) -> Tensor:
    """Sum of squares of fp32 `[n]`, fp64 `[]`, in two reductions whatever n.

    The order of its sums follows from n and from where in 16 bytes the first element lies: a job's
    slab is an allocation of its own, so that both are the job's.

    In runs, since torch's norm on CPUs adds all squares in fp32: of 10^8 equal ones, 4 % are lost.
    """
    begin = flat.data_ptr() - flat.storage_offset() * flat.element_size()
    assert begin % _PHASE == 0, "a slab must be an allocation of its own"
    whole = flat.numel() // _RUN * _RUN
    runs = torch.linalg.vector_norm(flat[:whole].view(-1, _RUN), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    return runs.double().square().sum() + rest.double().square()


def _update(slab: AdapterSlab, request: StepRequest, norm: float) -> AdamUpdate:
    spec = request.spec
    limit = spec.max_grad_norm or math.inf
    slab.wait_for_readers()
    return AdamUpdate(
        master=slab.master,
        grad=slab.grad[slab.held].to(slab.master.device),
        exp_avg=slab.exp_avg,
        exp_avg_sq=slab.exp_avg_sq,
        lr=request.lr,
        beta1=spec.betas[0],
        beta2=spec.betas[1],
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        step=request.updates + 1,
        clip=min(1.0, limit / (norm + 1e-6)),
    )
