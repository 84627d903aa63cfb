"""Master weights and moments in slices, or on the CPU: the same bits as whole."""

from __future__ import annotations

import pytest
import torch

from tlora_megatron.config.job import LoraSpec, OptimizerSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.sites import rank_sites
from tlora_megatron.layers.slab import AdapterSlab, StatePlacement, initial_factor
from tlora_megatron.model.backbone import LinearShape, LinearsSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.optimizer import StepRequest, step_adapters

SPEC = LinearsSpec(
    num_layers=2,
    vocab_size=32,
    max_positions=64,
    linears=(
        LinearShape(target="up", path="layers.{}.up", out_size=24, in_size=20),
        LinearShape(target="down", path="layers.{}.down", out_size=20, in_size=24),
    ),
)
LORA = LoraSpec(rank=3, target_modules=("up", "down"))
CPU = torch.device("cpu")


def trained(groups: ParallelGroups, placement: StatePlacement) -> AdapterSlab:
    """A slab after three steps, the second of which is not finite."""
    sites = rank_sites(SPEC, groups.layout, tp_rank=0, pp_rank=0)
    bank = AdapterBank(sites, [LORA], dtype=torch.bfloat16, device=CPU, placement=placement)
    slab = bank.new_slab(LORA)
    slab.load(lambda name: initial_factor(SPEC, name, LORA, 0))
    bank.install([Adapter(name="a", lora=LORA, slab=slab)])
    spec = OptimizerSpec(weight_decay=0.1, max_grad_norm=0.5)
    updates = 0
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        slab.grad.normal_(generator=generator)
        if step == 1:
            slab.grad[5] = torch.inf
        (outcome,) = step_adapters(
            bank, groups, [StepRequest(0, spec, 1e-2, updates, torch.tensor(1.0))]
        )
        assert outcome.applied == (step != 1)
        updates += outcome.applied
        assert not slab.grad.any()
    return slab


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
def test_steps_give_bits_of_the_whole(sliced: bool, on_cpu: bool, groups: ParallelGroups) -> None:
    whole = trained(groups, StatePlacement())
    placement = StatePlacement(group=groups.dp_cp_group if sliced else None, on_cpu=on_cpu)
    placed = trained(groups, placement)
    for name, buffer in whole.buffers().items():
        assert torch.equal(placed.whole(name), buffer), name
    room = torch.full((whole.layout.numel,), torch.nan, dtype=torch.bfloat16)
    placed.copy_weights(room)
    assert torch.equal(room, whole.master.bfloat16())


def test_a_loaded_buffer_is_the_one_that_was_saved(groups: ParallelGroups) -> None:
    slab = trained(groups, StatePlacement(group=groups.dp_cp_group))
    views = slab.layout.views(slab.whole("exp_avg"))
    factors = {f.name: f for f in slab.layout.factors}
    saved = {}
    for factor, view in zip(slab.layout.factors, views, strict=True):
        saved[factor.name] = view.clone() if factor.which == "lora_a" else view.t().clone()
    again = AdapterSlab(slab.layout, CPU, slab.placement)
    again.load(saved.__getitem__, "exp_avg")
    assert factors.keys() == saved.keys()
    assert torch.equal(again.whole("exp_avg"), slab.whole("exp_avg"))
