"""Four block-diagonal jobs and a standard one, over the losslessness scenario's base.

The ranks of `standard` and `thin` are above the smaller side of their linears, as PEFT allows.
"""

from __future__ import annotations

from typing import Any


def _blocks(rank: int, num_blocks: int, **lora: Any) -> dict[str, Any]:
    return {"rank": rank, "parametrization": "block_diagonal", "num_blocks": num_blocks, **lora}


BLOCK_JOBS: tuple[dict[str, Any], ...] = (
    {"name": "four", "lora": _blocks(8, 4, alpha=16, use_rslora=True), "batch_size": 3,
     "optimizer": {"lr": 2e-3, "max_grad_norm": 0.3, "weight_decay": 0.1},
     "schedule": {"name": "cosine", "warmup_steps": 2}},
    {"name": "standard",
     "lora": {"rank": 72, "alpha": 99, "target_modules": ["q_proj", "up_proj", "down_proj"]},
     "batch_size": 2, "optimizer": {"lr": 2e-3, "max_grad_norm": 1.0}},
    {"name": "eight",
     "lora": _blocks(24, 8, alpha=24, target_modules=["k_proj", "v_proj", "o_proj"]),
     "batch_size": 5, "optimizer": {"lr": 2e-3, "max_grad_norm": 0.5}, "seed": 7},
    {"name": "thin",
     "lora": _blocks(68, 4, alpha=68, target_modules=["gate_proj", "up_proj", "down_proj"]),
     "batch_size": 4, "optimizer": {"lr": 4e-3, "max_grad_norm": 0.0, "betas": [0.8, 0.95]},
     "schedule": {"name": "linear"}},
    {"name": "two",
     "lora": _blocks(6, 2, alpha=12, target_modules=["q_proj", "o_proj", "down_proj"]),
     "batch_size": 1, "optimizer": {"lr": 4e-3, "max_grad_norm": 0.5}},
)  # fmt: skip
