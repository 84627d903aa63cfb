"""A model and a machine with round numbers, so that times and bytes can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from tests.helpers.launch import REPO
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ExpertsSpec, ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import MemoryModel, MemoryUse
from tlora_megatron.planner.cost.step_terms import StepCost
from tlora_megatron.planner.hardware import (
    AttentionPoint,
    GemmPoint,
    HardwareProfile,
    HostCost,
    Link,
    LoraCost,
    load_profile,
)
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

SPEC = ModelSpec(
    model_type="llama",
    num_layers=4,
    hidden_size=100,
    num_heads=10,
    num_kv_heads=2,
    head_dim=10,
    ffn_size=200,
    vocab_size=1000,
    max_positions=4096,
    norm_eps=1e-5,
    rope_theta=1e4,
)
"""q 100, k and v 20 rows: qkv 140 x 100, proj 100 x 100, fc1 400 x 100, fc2 100 x 200."""

LARGE = replace(SPEC, hidden_size=4000, num_heads=40, num_kv_heads=8, head_dim=100, ffn_size=8000)
"""Weights of 1.1 GB: beside them communicators do not count for everything."""

FREE_LORA = LoraCost(**{field.name: 0.0 for field in fields(LoraCost)})
HARDWARE = HardwareProfile(
    name="round",
    gpu="round numbers",
    source="datasheet",
    date="2026-01-01",
    memory_bytes=1e9,
    reserved_bytes=0.0,
    copy_bytes_per_s=1e30,
    stream_bytes_per_s=1e9,
    gemms=(
        GemmPoint(
            rows=128, columns=100, inner=100, forward_flops_per_s=1e9, backward_flops_per_s=5e8
        ),
    ),
    attention=(AttentionPoint(length=1, forward_flops_per_s=1e9, backward_flops_per_s=1e9),),
    lora=FREE_LORA,
    host=HostCost(layer_s=0.0, round_s=0.0, job_step_s=0.0),
    gpus_per_node=8,
    intra_node=Link(bytes_per_s=1e9, latency_s=0.0),
    inter_node=Link(bytes_per_s=1e8, latency_s=0.0),
)
"""1 GFLOP/s forward and half of it backward, 1 GB/s everywhere, nothing else costs anything."""


def job(name: str = "a", **changes: object) -> JobLoad:
    """Rank 16 on q_proj alone, one sequence of 128 tokens a step, unless told otherwise."""
    base = JobLoad(
        name=name, rank=16, targets=("q_proj",), batch_size=1, lengths=LengthHistogram.single(128)
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def step_cost(
    spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan, hardware: HardwareProfile
) -> StepCost:
    """The predicted time of a round."""
    return CostModel(spec, jobs, hardware).step_cost(plan)


def memory_use(
    spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan, hardware: HardwareProfile, *rows: float
) -> MemoryUse:
    """The predicted memory, of micro-batches of so many rows where they are given."""
    return MemoryModel(spec, jobs, hardware).use(plan, *rows)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = replace(SPEC, experts=ExpertsSpec(num_experts=8, top_k=2, ffn_size=200, normalizes=True))
"""The same model with eight experts in the place of its MLP."""


def published(base: str) -> ModelSpec:
    """The shape of a base in `configs/models`."""
    return read_model_spec(REPO / f"configs/models/{base}.json")


def shipped(machine: str) -> HardwareProfile:
    """A profile of `configs/hardware`."""
    return load_profile(REPO / f"configs/hardware/{machine}.json")


LLAMA_8B, H200, L40S = published("llama-3.1-8b"), shipped("h200"), shipped("l40s")


def on_attention(length: int = 512, *batch_sizes: int) -> list[JobLoad]:
    """Jobs of rank 16 on the attention linears, one for each batch size."""
    lengths = LengthHistogram.single(length)
    return [
        job(f"job{number}", targets=ATTENTION, batch_size=size, lengths=lengths)
        for number, size in enumerate(batch_sizes or (16,))
    ]
