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
    tables = (1 if spec.tied_embeddings else 2) * spec.vocab_size * spec.hidden_size
    ends = tables + spec.hidden_size
    total, active = (
        ends + spec.num_layers * (weights + norms + biases)
        for weights in (spec.layer_weights, spec.row_weights)
    )
    return Parameters(total, active)
