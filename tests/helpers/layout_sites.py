"""A small model and what every rank of a layout holds of it."""

from __future__ import annotations

from tlora_megatron.layers.sites import Site, stage_sites
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec

SPEC = ModelSpec(
    model_type="llama",
    num_layers=4,
    hidden_size=24,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    ffn_size=40,
    vocab_size=32,
    max_positions=64,
    norm_eps=1e-6,
    rope_theta=1e4,
)


def sites_of_ranks(spec: ModelSpec, tp_size: int, pp_size: int = 1) -> list[tuple[Site, ...]]:
    """Sites of every model-parallel rank, TP fastest."""
    layout = ParallelLayout(tp_size=tp_size, pp_size=pp_size)
    return [
        stage_sites(spec, layout, tp_rank=tp_rank, pp_rank=pp_rank)
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]
