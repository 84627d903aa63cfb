"""Factors on routed experts: their place in the slabs of every layout, and what ranks draw."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.layout_sites import SPEC as SMALL
from tests.helpers.layout_sites import join_shards
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import (
    factor_names,
    factor_shape,
    find_whole_tensors,
    initial_factor,
)
from tlora_megatron.layers.slab_layout import SlabLayout, slab_layout
from tlora_megatron.model.layout import LoraSharding, ParallelLayout
from tlora_megatron.model.spec import EXPERT_LINEARS, ExpertsSpec

SPEC = replace(
    SMALL, model_type="qwen3_moe", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2,
    head_dim=8, ffn_size=24, vocab_size=64,
    experts=ExpertsSpec(num_experts=4, top_k=2, ffn_size=24, normalizes=True),
)  # fmt: skip
OWN = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
LORAS = {
    "own": LoraSpec(rank=4, expert_rank=3, target_modules=("q_proj", "o_proj", *OWN)),
    "fused": LoraSpec(rank=2, target_modules=("experts.linear_fc1", "experts.linear_fc2")),
    "outer": LoraSpec(
        rank=4, expert_rank=3, expert_sharing="outer", target_modules=("q_proj", "o_proj", *OWN)
    ),
}
LORAS["outer, fused"] = replace(LORAS["fused"], expert_sharing="outer")
LAYOUTS = {
    "one process": ParallelLayout(),
    "EP2": ParallelLayout(ep_size=2, dp_size=2),
    "TP2": ParallelLayout(tp_size=2),
    "TP2, experts whole": ParallelLayout(tp_size=2, expert_tp_size=1, sequence_parallel=True),
    "TP2xEP2, experts whole": ParallelLayout(
        tp_size=2, ep_size=2, expert_tp_size=1, sequence_parallel=True
    ),
    "TP2xEP2": ParallelLayout(tp_size=2, ep_size=2, dp_size=2),
    "PP2xEP2": ParallelLayout(pp_size=2, ep_size=2, dp_size=2),
}


def holders(layout: ParallelLayout, lora: LoraSpec) -> list[SlabLayout]:
    """The slabs' layouts of all ranks that together hold an adapter."""
    return [
        slab_layout(
            stage_sites(
                SPEC,
                layout,
                tp_rank=rank % layout.tp_size,
                pp_rank=pp_rank,
                place=layout.expert_place(rank),
            ),
            lora,
        )
        for pp_rank in range(layout.pp_size)
        for rank in range(layout.expert_holders)
    ]


@pytest.mark.parametrize("kind", LORAS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_of_all_ranks_are_the_whole(name: str, kind: str) -> None:
    lora, layouts = LORAS[kind], holders(LAYOUTS[name], LORAS[kind])
    whole = {n: torch.randn(factor_shape(SPEC, n, lora)) for n in factor_names(SPEC, lora)}
    slabs = join_shards(layouts, whole, SPEC)
    for tensor in find_whole_tensors(layouts, [slab.master for slab in slabs], SPEC):
        expected = whole[tensor.name]
        if len(tensor.shape) == 3:
            alone = tensor.of_expert(3)
            assert torch.equal(alone.join(torch.empty(alone.shape)), expected[3]), tensor.name


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sharding", ["fold", "s_lora"])
def test_what_experts_share_is_dense_and_replicated(name: str, sharding: LoraSharding) -> None:
    layout = replace(LAYOUTS[name], lora_sharding=sharding)
    for slab in holders(layout, LORAS["outer"]):
        shared = [f for f in slab.factors if ".experts." in f.name and f.experts is None]
        layers = 2 // layout.pp_size
        assert [f.shard.target for f in shared] == [*OWN] * layers
        assert [f.which for f in shared] == ["lora_a", "lora_a", "lora_b"] * layers
        assert all(f.shape == (3, 32) for f in shared)
        numel = sum(f.numel for f in shared)
        # They lie in front, in what tensor-parallel ranks sum, also where nothing else does.
        assert [f.offset for f in shared] == list(range(0, numel, 3 * 32))
        expected = numel if layout.tp_size > 1 else 0
        if layout.tp_size > 1 and sharding == "fold":
            expected += layers * 2 * 4 * 32  # A of q and B of o
        assert slab.replicated_numel == expected
        assert slab.experts_replicated == 0
        assert all((f.experts is None) == (f.offset < slab.experts_begin) for f in slab.factors)


def test_indices_are_beyond_those_of_dense_linears() -> None:
    sites = stage_sites(SPEC, ParallelLayout(), tp_rank=0, pp_rank=0)
    found = [site.index for site in sites if site.linear in EXPERT_LINEARS]
    assert found == [(1 << 21) + n for n in range(4)]


def test_an_expert_draws_by_its_own_number() -> None:
    name, lora = "layers.1.experts.up_proj.lora_a", LORAS["own"]
    drawn = initial_factor(SPEC, name, lora, 5)
    assert drawn.shape == (4, 3, 32)
    assert float(drawn.abs().max()) <= 32**-0.5
    assert len({float(expert.sum()) for expert in drawn}) == 4
    assert SPEC.experts is not None
    fewer = replace(SPEC, experts=replace(SPEC.experts, num_experts=2))
    assert torch.equal(initial_factor(fewer, name, lora, 5), drawn[:2])
    assert not initial_factor(SPEC, name.replace("lora_a", "lora_b"), lora, 5).any()
    shared = initial_factor(SPEC, name, LORAS["outer"], 5)
    assert shared.shape == (3, 32)
    assert len(torch.unique(torch.cat([drawn, shared[None]]))) == drawn.numel() + shared.numel()
