"""A base with routed experts for plans, and its jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.helpers.planner_case import SPEC
from tlora_megatron.model.experts import ExpertsSpec
from tlora_megatron.model.spec import ModelSpec, read_model_spec
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = replace(SPEC, experts=ExpertsSpec(num_experts=8, top_k=2, ffn_size=200, normalizes=True))
"""The hand-sized model of `planner_case` with eight experts in the place of its MLP."""


def published(repo: Path, base: str) -> ModelSpec:
    """The shape of a base in `configs/models`."""
    return read_model_spec(repo / f"configs/models/{base}.json")


def on_attention(length: int = 512, *batch_sizes: int) -> list[JobLoad]:
    """Jobs of rank 16 on the attention linears, one for each batch size."""
    return [
        JobLoad(
            name=f"job{number}",
            rank=16,
            targets=ATTENTION,
            batch_size=size,
            lengths=LengthHistogram.single(length),
        )
        for number, size in enumerate(batch_sizes or (16,))
    ]
