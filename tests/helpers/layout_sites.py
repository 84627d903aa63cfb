"""A small model and what every rank of a layout holds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tlora_megatron.layers.sites import Site, stage_sites
from tlora_megatron.layers.slab import AdapterSlab, find_whole_tensors
from tlora_megatron.layers.slab_layout import SlabLayout
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec

SPEC = ModelSpec(
    model_type="llama", num_layers=4, hidden_size=24, num_heads=8, num_kv_heads=4, head_dim=4,
    ffn_size=40, vocab_size=32, max_positions=64, norm_eps=1e-6, rope_theta=1e4,
)  # fmt: skip


def sites_of_ranks(spec: ModelSpec, tp_size: int, pp_size: int = 1) -> list[tuple[Site, ...]]:
    """Sites of every model-parallel rank, TP fastest."""
    layout = ParallelLayout(tp_size=tp_size, pp_size=pp_size)
    return [
        stage_sites(spec, layout, tp_rank=tp_rank, pp_rank=pp_rank)
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]


def whole_tensors(
    layouts: Sequence[SlabLayout], buffers: Sequence[Tensor], spec: ModelSpec
) -> dict[str, Tensor]:
    """Joins the flat buffers of all model-parallel ranks into whole canonical CPU tensors."""
    found = find_whole_tensors(layouts, [buffer.cpu() for buffer in buffers], spec)
    return {tensor.name: tensor.join(torch.empty(tensor.shape)) for tensor in found}


def join_shards(
    layouts: Sequence[SlabLayout], factors: Mapping[str, Tensor], spec: ModelSpec
) -> list[AdapterSlab]:
    """Loads whole factors into every rank's slab; joined, these must be the factors again."""
    slabs = [AdapterSlab(layout, torch.device("cpu")) for layout in layouts]
    for slab in slabs:
        slab.master.fill_(torch.nan)
        slab.load(factors.__getitem__)
    whole = whole_tensors(layouts, [slab.master for slab in slabs], spec)
    assert whole.keys() == factors.keys()
    assert all(torch.equal(whole[name], factors[name]) for name in factors)
    return slabs
