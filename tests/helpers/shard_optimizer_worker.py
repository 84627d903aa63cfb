"""Steps the same jobs with whole states and with states in slices, on two or four processes.

`shard_optimizer_worker.py`, over NCCL where there are GPUs: without a model, from random gradients.
In each layout jobs step at different rounds, one of them is clipped, and one meets a gradient that
is not finite.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.helpers.built_model import fill_bank
from tests.helpers.layout_sites import SPEC, sites_of_ranks
from tests.helpers.variants import begin_world, end_world
from tests.unit.training.test_optimizer import LORAS, SPECS
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.slab import AdapterSlab, StatePlacement
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.optimizer import StepOutcome, StepRequest, step_adapters
from tlora_megatron.training.saving.snapshot import BUFFERS, SnapshotTaker

ROUNDS = 6
LAYOUTS = {
    2: {"DP2": ParallelLayout(dp_size=2), "CP2": ParallelLayout(cp_size=2)},
    4: {"DP4": ParallelLayout(dp_size=4), "TP2 DP2": ParallelLayout(tp_size=2, dp_size=2),
     "DP2 CP2": ParallelLayout(dp_size=2, cp_size=2)},
}  # fmt: skip
"""By number of processes."""


class Steps(NamedTuple):
    bank: AdapterBank
    outcomes: list[StepOutcome]


def groups_of(layout: ParallelLayout, device: torch.device) -> ParallelGroups:
    """TP fastest, then CP, as Megatron lays ranks out; every process makes every group."""
    rank, tp, size = dist.get_rank(), layout.tp_size, layout.world_size
    models = [list(range(begin, begin + tp)) for begin in range(0, size, tp)]
    replicas = [list(range(place, size, tp)) for place in range(tp)]
    made = {tuple(ranks): dist.new_group(ranks) for ranks in models + replicas}
    model_group, dp_cp_group = (
        next(made[tuple(ranks)] for ranks in kind if rank in ranks) for kind in (models, replicas)
    )
    return ParallelGroups(
        layout=layout, tp_rank=rank % tp, pp_rank=0, cp_rank=rank // tp % layout.cp_size,
        dp_rank=rank // tp // layout.cp_size, tp_group=model_group, dp_cp_group=dp_cp_group,
        model_group=model_group, device=device,
    )  # fmt: skip


def stepped(groups: ParallelGroups, placement: StatePlacement) -> Steps:
    tp_size, device = groups.layout.tp_size, groups.device
    sites = sites_of_ranks(SPEC, tp_size)[groups.tp_rank]
    bank = AdapterBank(sites, LORAS, dtype=torch.bfloat16, device=device, placement=placement)
    fill_bank(bank, SPEC, LORAS)
    slabs = [adapter.slab for adapter in bank.adapters]
    draw = torch.Generator().manual_seed(dist.get_rank())
    updates, outcomes = [0] * len(slabs), list[StepOutcome]()
    for number in range(ROUNDS):
        for slab in slabs:  # of a batch that several rounds complete, the parts are added
            slab.grad.add_(torch.randn(slab.layout.numel, generator=draw).to(device))
        if number == 3 and dist.get_rank() == 1:
            slabs[0].grad[7] = torch.inf
        slots = [slot for slot in range(len(slabs)) if number % (slot + 1) == 0]
        loss = torch.tensor(1.0, device=device)
        requests = [
            StepRequest(slot, SPECS[slot], SPECS[slot].lr, updates[slot], loss) for slot in slots
        ]
        found = step_adapters(bank, groups, requests)
        for slot, outcome in zip(slots, found, strict=True):
            updates[slot] += outcome.applied
        outcomes += found
    return Steps(bank, outcomes)


def compare(groups: ParallelGroups) -> None:
    """States in slices come to the bits of whole ones, in a part of their memory."""
    whole = stepped(groups, StatePlacement.over_replicas(groups, shards=False))
    sliced = stepped(groups, StatePlacement.over_replicas(groups, shards=True))
    assert repr(sliced.outcomes) == repr(whole.outcomes)
    assert [outcome.applied for outcome in whole.outcomes].count(False) == 1
    replicas = groups.layout.dp_size * groups.layout.cp_size
    for slot, adapter in enumerate(whole.bank.adapters):
        slab = sliced.bank.adapters[slot].slab
        assert slab.master.numel() <= -(-slab.layout.numel // (64 * replicas)) * 64
        for name, buffer in adapter.slab.buffers().items():
            assert torch.equal(slab.whole(name), buffer), name
        copies = zip(sliced.bank._copies[slot], whole.bank._copies[slot], strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in copies)
        ours, theirs = snapshot(groups, slab), snapshot(groups, adapter.slab)
        assert all(torch.equal(values, theirs[name]) for name, values in ours.items()), slot


def snapshot(groups: ParallelGroups, slab: AdapterSlab) -> dict[str, torch.Tensor]:
    """The values that a checkpoint is written from, on the process that writes."""
    taker = SnapshotTaker(SPEC, groups)
    room = torch.zeros(taker.numel(slab.layout.lora)) if groups.is_writer else None
    taken = taker.take(slab, BUFFERS, room)
    if taken is None:
        return {}
    taken.wait()
    assert all(values.any() for values in taken.buffers.values())
    return taken.buffers


def main() -> None:
    device = begin_world()
    for name, layout in LAYOUTS[dist.get_world_size()].items():
        compare(groups_of(layout, device))
        if dist.get_rank() == 0:
            print("the same bits in", name, flush=True)
    end_world()


if __name__ == "__main__":
    main()
