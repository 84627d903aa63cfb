"""Numbers of a base model's parameters."""

from __future__ import annotations

from typing import NamedTuple

from tlora_megatron.model.spec import ModelSpec


class Parameters(NamedTuple):
    """Parameters of a base model, embedding and output layer included."""

    total: int
    active: int
    """Those that one row meets; all of them without routed experts."""


def count_parameters(spec: ModelSpec) -> Parameters:
    """Counts a base model's parameters."""
    norms = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    biases = spec.q_size + 2 * spec.kv_size if spec.qkv_bias else 0
    if spec.gpt_oss is not None:
        biases += spec.hidden_size + spec.num_heads  # of the output, and the sinks
    tables = (1 if spec.tied_embeddings else 2) * spec.vocab_size * spec.hidden_size
    ends = tables + spec.hidden_size
    total, active = (
        ends + spec.num_layers * (weights + norms + biases + _expert_biases(spec, is_active))
        for weights, is_active in ((spec.layer_weights, False), (spec.row_weights, True))
    )
    return Parameters(total, active)


def _expert_biases(spec: ModelSpec, is_active: bool) -> int:
    """Those of a layer's router and experts, or of the experts that one row meets."""
    experts = spec.experts
    if experts is None or experts.glu is None:
        return 0
    count = experts.top_k if is_active else experts.num_experts
    return experts.num_experts + count * (2 * spec.ffn_size + spec.hidden_size)
