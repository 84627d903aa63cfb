"""The planner's counts of an adapter are what every tensor-parallel rank really holds."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.planner_case import SPEC as PLANNED
from tests.helpers.planner_case import job
from tlora_megatron.config.job import HF_TARGETS, LoraSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import AdapterSlab
from tlora_megatron.model.layout import LoraSharding, ParallelLayout
from tlora_megatron.ops.lora.linear_ops import SiteFactors
from tlora_megatron.planner.candidate import SHARDINGS
from tlora_megatron.planner.cost.adapter_sizes import (
    adapter_elements,
    copied_elements,
    spread_elements,
)

SPEC = replace(
    PLANNED, num_layers=1, hidden_size=64, num_heads=8, num_kv_heads=8, head_dim=8, ffn_size=96
)
CPU = torch.device("cpu")
FUSED = ("linear_qkv", "o_proj", "linear_fc1", "down_proj")


@st.composite
def adapters(draw: st.DrawFn) -> tuple[LoraSpec, int]:
    """An adapter and a tensor-parallel size that may hold it; odd ranks, and ranks below it."""
    tp_size = draw(st.sampled_from((1, 2, 4, 8)))
    if draw(st.booleans()):
        targets = draw(st.sampled_from((HF_TARGETS, FUSED)).flatmap(_some))
        return LoraSpec(rank=draw(st.integers(1, 40)), target_modules=targets), tp_size
    num_blocks = draw(st.sampled_from([n for n in (2, 4, 8) if n % tp_size == 0]))
    lora = LoraSpec(
        rank=num_blocks * draw(st.integers(1, 6)),
        target_modules=draw(_some(HF_TARGETS)),
        parametrization="block_diagonal",
        num_blocks=num_blocks,
    )
    return lora, tp_size


def _some(targets: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(targets), min_size=1, unique=True).map(tuple)


@settings(max_examples=60, deadline=None)
@given(case=adapters(), sharding=st.sampled_from(SHARDINGS))
def test_counts_are_those_of_every_rank(case: tuple[LoraSpec, int], sharding: LoraSharding) -> None:
    lora, tp_size = case
    load = replace(job(rank=lora.rank), targets=lora.target_modules, num_blocks=lora.num_blocks)
    layout = ParallelLayout(tp_size=tp_size, lora_sharding=sharding)
    for tp_rank in range(tp_size):
        sites = stage_sites(SPEC, layout, tp_rank=tp_rank, pp_rank=0)
        bank = AdapterBank(sites, [lora], dtype=torch.float32, device=CPU)
        slab = bank.new_slab(lora)
        bank.install([Adapter(name="a", lora=lora, slab=slab)])
        replicated = adapter_elements(SPEC, load, tp_size, sharding, replicated_only=True)
        assert slab.layout.numel == adapter_elements(SPEC, load, tp_size, sharding)
        assert slab.layout.replicated_numel == replicated
        assert arena_elements(bank) == copied_elements(SPEC, load, tp_size, sharding)
        assert off_diagonal_elements(slab) == spread_elements(SPEC, load, tp_size)


def arena_elements(bank: AdapterBank) -> int:
    """Elements of all compute copies; what no linear reads is one element, expanded."""
    made: list[SiteFactors] = []
    for factors in (bank.fused_factors, bank.s_lora_a_factors, bank.block_diagonal_factors):
        made += factors.values()
    arenas = [arena for factors in made for arena in (factors.lora_a, *factors.lora_b)]
    return sum(arena.numel() for arena in arenas if arena.is_contiguous())


def off_diagonal_elements(slab: AdapterSlab) -> int:
    """Elements of the gradients that hold more than the blocks."""
    names = {factor.name for factor in slab.layout.spread}
    return sum(view.numel() for name, view in slab.grad_views.items() if name in names)
