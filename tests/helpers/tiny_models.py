"""Small random Hugging Face checkpoints of each supported architecture, and adapters for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.slab import factor_shape
from tlora_megatron.model.spec import ModelSpec

TinyModelType = Literal[
    "llama", "llama3", "qwen2", "qwen3", "mistral", "qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss"
]
TINY_MODEL_TYPES: tuple[TinyModelType, ...] = ("llama", "llama3", "qwen2", "qwen3", "mistral")
TINY_EXPERT_TYPES: tuple[TinyModelType, ...] = ("qwen2_moe", "qwen3_moe", "mixtral")
"""Of transformers' usual attention."""

_WEIGHT_STD = 0.15
"""Logits of attention and output spread by about 1 at hidden size 64: no softmax is flat."""

_SHAPE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 8, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip

GPU_SHAPE: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512,
}  # fmt: skip
"""What makes a tiny model wide enough for the kernels of GPUs."""

_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip

GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
"""Documents are longer than the window, the limit is met, and frequencies lie between the bounds
of YaRN."""


def make_tiny_model(
    directory: Path,
    model_type: TinyModelType,
    *,
    tied: bool = False,
    seed: int = 0,
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **shape: Any,
) -> Path:
    """Writes `config.json` and safetensors of a random model that depends on `seed` only.

    Norm weights and biases are not trivial, so that a loader which forgets one changes the logits.

    Args:
        directory: made where it does not exist.
        model_type: `llama3` is Llama with llama3 rope scaling.
        tied: the output layer shares the embedding's weight.
        num_shards: number of safetensors files; over one, with `model.safetensors.index.json`.
        dtype: of the stored weights.
        **shape: fields of the Hugging Face config that replace the small ones here.
    """
    config = tiny_config(model_type, tied=tied, dtype=dtype, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    randomize(model, seed=seed)
    directory = Path(directory)
    model.save_pretrained(directory)
    if num_shards > 1:
        _shard(directory, num_shards)
    return directory


def tiny_config(
    model_type: TinyModelType, *, tied: bool = False, **fields: Any
) -> PretrainedConfig:
    """Config of a tiny model; `fields` replace the values of the common small shape."""
    values = _SHAPE | {"tie_word_embeddings": tied}
    if model_type == "qwen3":
        # Qwen3's head_dim is not hidden_size / num_heads.
        values["head_dim"] = 16
    if model_type == "mistral":
        values["sliding_window"] = None
    if model_type == "llama3":
        values["rope_parameters"] = dict(_LLAMA3_ROPE)
    if model_type == "gpt_oss":
        values |= GPT_OSS
    if model_type in TINY_EXPERT_TYPES:
        values |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if model_type == "qwen2_moe":
        values |= {"num_experts": values.pop("num_local_experts"), "norm_topk_prob": False}
        values |= {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80}
    if model_type == "qwen3_moe":
        values |= {"head_dim": 16, "moe_intermediate_size": 48, "norm_topk_prob": True}
    classes = {
        "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig,
        "qwen2_moe": Qwen2MoeConfig, "qwen3_moe": Qwen3MoeConfig, "mixtral": MixtralConfig,
        "gpt_oss": GptOssConfig,
    }  # fmt: skip
    return classes.get(model_type, LlamaConfig)(**(values | fields))


def randomize(model: PreTrainedModel, *, seed: int) -> None:
    """Draws every parameter in name order: norm weights around 1, all else around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator) * _WEIGHT_STD
            weight.copy_(noise + 1.0 if name.endswith("norm.weight") else noise)


def load_peer(directory: Path) -> PreTrainedModel:
    """The model of transformers in fp32, computing what its files say in every release.

    Some (5.17 for one, not 5.24) take gpt-oss's limit to be 7 whatever `swiglu_limit` says, and
    read all of a folder in MXFP4 as bf16 beside a GPU, which rounds what is no code.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).float()
    for module in model.modules():
        if hasattr(module, "limit") and hasattr(module, "alpha"):
            module.limit = model.config.swiglu_limit
    for path in directory.glob("*.safetensors"):
        model.load_state_dict(load_file(path), strict=False)
    return model


def to_mxfp4(directory: Path) -> None:
    """Draws a gpt-oss base's experts anew as MXFP4, in the form in which it was published."""
    generator = torch.Generator().manual_seed(0)
    path, config_json = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(path)
    for name in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, size_in, size_out = tensors.pop(name).shape
        of_scales = (experts, size_out, size_in // 32)
        codes = torch.randint(256, (*of_scales, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 125, of_scales, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(tensors, path, metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"]}
    config = json.loads(config_json.read_text()) | {"quantization_config": stated}
    config_json.write_text(json.dumps(config))


def _shard(directory: Path, num_shards: int) -> None:
    """Splits `model.safetensors` round robin, so that one layer's weights lie in several files."""
    whole = directory / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::num_shards]}
        save_file(part, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def random_factors(
    model: ModelSpec, lora: LoraSpec, *, seed: int = 0, b_std: float = 0.1
) -> dict[str, Tensor]:
    """Canonical whole fp32 factors of an adapter; `b_std=0` gives the zero B of a fresh one."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for layer in range(model.num_layers):
        for target in lora.target_modules:
            name = f"layers.{layer}.{target}"
            of_a, of_b = (
                factor_shape(model, f"{name}.{side}", lora) for side in ("lora_a", "lora_b")
            )
            lora_a = torch.randn(of_a, generator=generator) / of_a[-1] ** 0.5
            lora_b = torch.randn(of_b, generator=generator) * b_std
            factors[f"{name}.lora_a"] = lora_a
            factors[f"{name}.lora_b"] = lora_b
    return factors
