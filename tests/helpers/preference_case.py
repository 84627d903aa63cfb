"""Jobs of pairs on the quickstart's base, and the same as TRL's DPOTrainer gets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tlora_megatron.config.load import load_config
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.training.data.job_data import BatchPlan, load_job_data
from tlora_megatron.training.data.tokenize import load_tokenizer
from tlora_megatron.training.preference import SCORES, sides_of

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


def request_of(config: Path, root: Path) -> dict[str, Any]:
    """The job `dpo` for `oracle_preference`."""
    job = next(job for job in load_config(config).jobs if job.name == "dpo")
    spec = read_model_spec(QUICKSTART / "base" / "config.json")
    data = load_job_data(job, load_tokenizer(QUICKSTART / "base"), spec.vocab_size)
    plan = BatchPlan.for_job(job, len(data.train))
    pairs = [i for step in range(plan.num_steps) for i in plan.indices(step)]
    sides = sides_of(data.train, pairs)
    assert job.preference is not None, "the job is one of pairs"
    rows = []
    for chosen, rejected in zip(sides[::2], sides[1::2], strict=True):
        prompt = int(chosen.is_target.argmax())
        rows.append({
            "prompt_ids": chosen.tokens[:prompt].tolist(),
            "chosen_ids": chosen.tokens[prompt:].tolist(),
            "rejected_ids": rejected.tokens[prompt:].tolist(),
        })  # fmt: skip
    weight = job.preference.sft_weight
    losses = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, weight]} if weight else {}
    return {
        "base": str(QUICKSTART / "base"),
        "init": job.init_from,
        "pairs": rows,
        "settings": {
            "beta": job.preference.beta,
            "learning_rate": job.optimizer.lr,
            "max_grad_norm": job.optimizer.max_grad_norm,
            "per_device_train_batch_size": job.batch_size,
            "max_steps": plan.num_steps,
            **losses,
        },
        "out": str(root / "log.json"),
        "adapter": str(root / "adapter"),
    }
