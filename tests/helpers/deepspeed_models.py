"""Small runs over models of several families, Llama's names or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoXConfig

from tests.helpers.oracle import OracleResult
from tests.helpers.scenario import job_alone, write_rows
from tests.helpers.tiny_models import make_tiny_model, randomize
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tlora_megatron.config.load import read_config
from tlora_megatron.model.backbone import LinearsSpec

DENSE_FAMILIES = ("qwen3", "mistral", "gpt_neox")
EXPERT_FAMILIES = ("mixtral", "qwen2_moe")
FAMILIES = DENSE_FAMILIES + EXPERT_FAMILIES
NUM_STEPS = 4

_NEOX_TARGETS = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]


def make_family(root: Path, family: str) -> dict[str, Any]:
    """Writes `root/base` and two jobs' data; returns a `tlora` section over them."""
    base = root / "base"
    if family == "gpt_neox":
        make_gpt_neox(base)
    else:
        make_tiny_model(base, family, vocab_size=VOCAB_SIZE, tied=family == "qwen3")  # type: ignore[arg-type]
    save_tiny_tokenizer(base)
    wide: dict[str, Any] = {"target_modules": _NEOX_TARGETS} if family == "gpt_neox" else {}
    narrow = _NEOX_TARGETS[1:3] if family == "gpt_neox" else ["v_proj", "down_proj"]
    if family in EXPERT_FAMILIES:
        wide, narrow = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, ["v_proj"]
    loras = [{"rank": 8, "alpha": 16, **wide}, {"rank": 4, "alpha": 8, "target_modules": narrow}]
    jobs = []
    for index, lora in enumerate(loras):
        write_rows(root / f"{index}.jsonl", 12, seed=index)
        jobs.append(
            {
                "name": f"job{index}",
                "data": {"train": f"{index}.jsonl"},
                "lora": lora,
                "batch_size": 2 + index,
                "max_steps": NUM_STEPS,
                "max_seq_len": 80,
                "optimizer": {"lr": 4e-3},
            }
        )
    run = {"output_dir": "out", "micro_batch_tokens": 256, "tensorboard": False}
    return {"base_model": {"path": "base", "dtype": "float32"}, "run": run, "jobs": jobs}


def make_gpt_neox(directory: Path) -> None:
    """A random GPT-NeoX: fused query_key_value, biases, partial rotary, parallel residual."""
    config = GPTNeoXConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=8, intermediate_size=96,
        vocab_size=VOCAB_SIZE, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # With other seeds a gradient near 0 lets Adam step as its sums are rounded, up to 1e-4.
    randomize(model, seed=2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layernorm.weight" in name or name.endswith("layer_norm.weight"):
                weight.add_(1.0)
    model.save_pretrained(directory)


def family_oracle(
    root: Path, section: dict[str, Any], spec: LinearsSpec
) -> dict[str, OracleResult]:
    """Each job alone under transformers and PEFT."""
    jobs = read_config(section, root, targets=None).jobs
    return {job.name: job_alone(root / "base", job, spec) for job in jobs}


_MOE: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LFM2 = {"layer_types": ["conv", "full_attention", "conv"]}
APART: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": {},
    "glm4_moe": {**_MOE, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {
        **_MOE,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
    },
}
"""transformers' families whose layers keep documents apart, and fields of a small one."""
MIXED: dict[str, dict[str, Any]] = {
    "lfm2": _LFM2,
    "lfm2_moe": {**_LFM2, "num_experts": 4, "moe_intermediate_size": 32, "num_dense_layers": 1},
}
"""Those with short convolutions over all rows."""
DELTA_NETS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
     "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {},
}  # fmt: skip
"""Those with gated delta nets."""
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def untrained(family: str, dtype: torch.dtype) -> Any:
    """A small model as transformers draws it, of a family of `APART`, `MIXED` or `DELTA_NETS`."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    fields |= _DELTA if family in DELTA_NETS else {}
    config = AutoConfig.for_model(family, **fields | (APART | MIXED | DELTA_NETS)[family])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def write_untrained(root: Path, family: str, dtype: str) -> dict[str, Any]:
    """Writes such a model and a job's data; returns a `tlora` section over them."""
    base = root / family / dtype
    untrained(family, getattr(torch, dtype)).save_pretrained(base)
    save_tiny_tokenizer(base)
    write_rows(base / "job.jsonl", 4, seed=0)
    job = {"name": "job", "data": {"train": str(base / "job.jsonl")}, "max_steps": 1}
    job |= {"max_seq_len": 80, "lora": {"rank": 2, "target_modules": ["o_proj"]}}
    if family in MIXED:
        job["lora"] = {"rank": 2, "target_modules": ["w1"]}
    run = {"output_dir": str(base / "out"), "micro_batch_tokens": 256, "tensorboard": False}
    return {"base_model": {"path": str(base), "dtype": dtype}, "run": run, "jobs": [job]}
