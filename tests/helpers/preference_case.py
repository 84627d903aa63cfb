"""Jobs of pairs on the quickstart's base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tlora_megatron.training.preference import SCORES

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
RECORDED = Path(__file__).with_name("trl_dpo.json")
"""What `DPOTrainer` of TRL 1.16.0 has logged of `make_config`'s job `dpo`."""
STEPS = 8
LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
KEYS = ("loss", "grad_norm", *SCORES)


def make_start(folder: Path) -> Path:
    """An adapter of PEFT's whose B is not zero, so that the reference is not the base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(QUICKSTART / "base", dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=LORA["target_modules"])
    model = get_peft_model(base, config)
    draw = torch.Generator().manual_seed(0)
    for name, value in model.named_parameters():
        if "lora_" in name:
            value.data = 0.05 * torch.randn(value.shape, generator=draw)
    model.save_pretrained(folder)
    return folder


def make_config(root: Path, *jobs: dict[str, Any], **run: Any) -> Path:
    """The job `dpo`, and others beside it."""
    own = {
        "name": "dpo",
        "data": {part: str(QUICKSTART / f"data/pairs_{part}.jsonl") for part in ("train", "eval")},
        "preference": {},
        "lora": LORA,
        "batch_size": 4,
        "max_seq_len": 64,
        "max_steps": STEPS,
        "optimizer": {"lr": 1e-3},
        "init_from": str(make_start(root / "start")),
    }
    document = {
        "base_model": {"path": str(QUICKSTART / "base"), "dtype": "float32"},
        "run": {"output_dir": "out", "micro_batch_tokens": 256, "tensorboard": False, **run},
        "jobs": [own, *jobs],
    }
    path = root / "config.json"
    path.write_text(json.dumps(document))
    return path


def sft(name: str, **more: Any) -> dict[str, Any]:
    """A supervised job."""
    data = {"train": str(QUICKSTART / "data/sums_train.jsonl")}
    return {"name": name, "data": data, "max_seq_len": 80, "max_steps": STEPS, **more}
