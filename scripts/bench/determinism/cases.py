"""Base models, layouts and documents of the determinism benchmark."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from scripts.bench.determinism.mixes import TARGETS, Mix, Plan, draw_mix
from scripts.bench.harness.arguments import REPO
from tlora_megatron.config.schema import Recompute
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec, read_model_spec

MODEL = REPO / "configs/models/llama-3.1-8b.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A base model and the micro-batches that it gets."""

    layers: int
    changes: dict[str, int]
    """Fields in which the shape is not Llama-3.1-8B's."""
    micro_batch_tokens: int
    portion_tokens: int
    longest: int
    """Rows of the longest sequence of a drawn mix."""

    def spec(self, model: Path = MODEL) -> ModelSpec:
        """The model's shape."""
        return replace(read_model_spec(model), num_layers=self.layers, **self.changes)

    def mix(self, draw: random.Random, steps: int) -> Mix:
        """Draws a mix for this size, whose watched job takes so many steps."""
        return draw_mix(
            draw, longest=self.longest, portion_tokens=self.portion_tokens, most_steps=steps
        )


SIZES = {
    "toy": Size(
        layers=2,
        changes={
            "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
            "ffn_size": 96, "vocab_size": 128,
        },
        micro_batch_tokens=384, portion_tokens=96, longest=60,
    ),
    "heads of 64": Size(
        layers=2,
        changes={
            "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64,
            "ffn_size": 2816, "vocab_size": 4096,
        },
        micro_batch_tokens=4096, portion_tokens=1024, longest=900,
    ),
    "heads of 128": Size(
        layers=2,
        changes={
            "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128,
            "ffn_size": 5632, "vocab_size": 4096,
        },
        micro_batch_tokens=8192, portion_tokens=2048, longest=3000,
    ),
    "8b": Size(
        layers=8, changes={}, micro_batch_tokens=8192, portion_tokens=1024, longest=1000
    ),
}  # fmt: skip
"""Both small ones have 16 heads: below nine documents of a micro-batch, attention's own choice of
splits follows from their number. `heads of 128` has documents of both of its classes."""


class Case(NamedTuple):
    """The way in which processes share a run."""

    layout: ParallelLayout
    recompute: Recompute = "none"
    nano_batches: int = 1


CASES = {
    "tp1": Case(ParallelLayout()),
    "tp1 selective": Case(ParallelLayout(), "selective"),
    "tp1 full": Case(ParallelLayout(), "full"),
    "tp2": Case(ParallelLayout(tp_size=2)),
    "tp2 full": Case(ParallelLayout(tp_size=2), "full"),
    "tp2 nano2": Case(ParallelLayout(tp_size=2), nano_batches=2),
    "tp2 s_lora": Case(ParallelLayout(tp_size=2, lora_sharding="s_lora")),
    "tp2+sp s_lora": Case(
        ParallelLayout(tp_size=2, sequence_parallel=True, lora_sharding="s_lora")
    ),
    "pp2": Case(ParallelLayout(pp_size=2)),
    "dp2": Case(ParallelLayout(dp_size=2)),
}


def cases_of(world_size: int) -> list[str]:
    """Names of the cases for so many processes."""
    return [name for name, case in CASES.items() if case.layout.world_size == world_size]


DOCUMENTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "32 x 256": ((256,) * 4,) * 8,
    "8 x 1024": ((1024,),) * 8,
    "9 of 148 to 1800": ((300, 1700, 900), (148, 1800, 248), (1048, 1048, 1000)),
    "4 x 2048": ((2048,),) * 4,
    "1 x 8192": ((8192,),),
}
"""Lengths of each job's batch; all together fill a micro-batch of 8,192 rows."""


def timed_jobs(documents: str, tokens: int, dropout: float) -> tuple[Plan, ...]:
    """Jobs of rank 16 on all linears, each a portion, that together fill a micro-batch."""
    scale = tokens / 8192
    return tuple(
        Plan(
            name=f"job{index}",
            rank=16,
            dropout=dropout,
            targets=TARGETS[0],
            lengths=tuple(max(2, round(scale * length)) for length in lengths),
            batch_size=len(lengths),
            seed=index,
            lr=1e-4,
            portion_tokens=tokens,
        )
        for index, lengths in enumerate(DOCUMENTS[documents])
    )


def dtype_here() -> torch.dtype:
    """bf16 where there is a GPU."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32
