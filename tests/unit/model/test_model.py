"""`config.json` means what transformers' config classes read in it, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tlora_megatron.config.job import DataSpec, JobSpec
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.model.config_json import (
    DENSE_MODEL_TYPES,
    SUPPORTED_MODEL_TYPES,
    read_model_spec,
)
from tlora_megatron.model.spec import ModelSpec, count_parameters
from tlora_megatron.training.data.tokenize import load_tokenizer
from tlora_megatron.training.run.preparation import prepare_job

SIZES = {
    "num_hidden_layers": 3, "hidden_size": 320, "num_attention_heads": 32, "intermediate_size": 64,
    "vocab_size": 96,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
WINDOWED = {"use_sliding_window": True, "sliding_window": 128}
QWENS = ("qwen2", "qwen3")
USUAL_MODEL_TYPES = [kind for kind in SUPPORTED_MODEL_TYPES if kind != "gpt_oss"]
"""Those that run without windows (test_gpt_oss.py)."""


def read(tmp_path: Path, model_type: str = "llama", **fields: Any) -> ModelSpec:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES | {"model_type": model_type} | fields))
    return read_model_spec(path)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 4},
        {"head_dim": 16},
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": True},
        {"rope_theta": 500000.0},
        {"rope_scaling": None, "rope_theta": 7e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
        {"rope_parameters": {"rope_theta": 3e4}, "rope_theta": 5e4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}, "rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "default"}, "rope_theta": 2e4},
        {"rope_scaling": LLAMA3, "rope_theta": 5e5},
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
        {"sliding_window": 128},
        {"sliding_window": None},
        {**WINDOWED, "max_window_layers": 2},
        {**WINDOWED, "max_window_layers": 3},
        {"sliding_window": 128, "use_sliding_window": False, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", USUAL_MODEL_TYPES)
def test_absent_and_present_keys_mean_what_transformers_reads(
    tmp_path: Path, model_type: str, fields: dict[str, Any]
) -> None:
    _check_against_transformers(tmp_path, model_type, fields)


@pytest.mark.parametrize("kinds", [("full", "full", "full"), ("sliding", "full", "full")])
@pytest.mark.parametrize("model_type", ["llama", *QWENS])
def test_a_window_layer_by_layer_is_what_transformers_applies(
    tmp_path: Path, model_type: str, kinds: tuple[str, ...]
) -> None:
    layer_types = [f"{kind}_attention" for kind in kinds]
    _check_against_transformers(tmp_path, model_type, {**WINDOWED, "layer_types": layer_types})


def assert_same_sizes(spec: ModelSpec, config: Any) -> None:
    """Those that all of transformers' config classes have."""
    names = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "vocab_size": "vocab_size",
        "max_positions": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "tied_embeddings": "tie_word_embeddings",
    }
    for ours, theirs in names.items():
        assert getattr(spec, ours) == getattr(config, theirs), ours
    assert spec.head_dim == (getattr(config, "head_dim", None) or 320 // 32)


def _check_against_transformers(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    from transformers import AutoConfig

    spec = read(tmp_path, model_type, **fields)
    config = AutoConfig.from_pretrained(tmp_path)
    config.standardize_rope_params()  # as the model does once more when it computes frequencies
    rope = config.rope_parameters
    assert_same_sizes(spec, config)
    assert spec.ffn_size == getattr(config, "moe_intermediate_size", config.intermediate_size)
    assert spec.rope_theta == rope["rope_theta"]
    scaled = rope["rope_type"] == "llama3"
    assert spec.rope_scaling == ({key: rope[key] for key in SCALING} if scaled else None)
    assert spec.sliding_window == _window_of(config)


def _window_of(config: Any) -> int | None:
    """The narrowest mask that transformers' model of this config applies."""
    from transformers import AutoModel

    config.vocab_size, config.hidden_size, config.intermediate_size = 8, 32, 8
    config.num_attention_heads = config.num_key_value_heads = 1
    config.num_experts = config.num_local_experts = config.num_experts_per_tok = 2
    layers = AutoModel.from_config(config).layers
    if config.model_type in ("mistral", "mixtral", "qwen3_moe"):
        return config.sliding_window
    if config.model_type == "qwen2_moe" and "sliding_attention" not in config.layer_types:
        return None
    windows = {getattr(layer.self_attn, "sliding_window", None) for layer in layers}
    return next(iter(windows - {None}), None)


def test_nulls_mean_as_many_heads_and_their_share_of_the_width(tmp_path: Path) -> None:
    spec = read(tmp_path, "llama", num_key_value_heads=None, head_dim=None)
    assert (spec.num_kv_heads, spec.head_dim) == (32, 10)


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_families(tmp_path: Path, model_type: str) -> None:
    spec = read(tmp_path, model_type)
    assert spec.model_type == model_type
    assert spec.qkv_bias == (model_type in ("qwen2", "qwen2_moe", "gpt_oss"))
    assert (spec.gpt_oss is not None) == (model_type == "gpt_oss")
    assert (spec.shared_ffn_size is not None) == (model_type == "qwen2_moe")
    assert spec.qk_norm == (model_type in ("qwen3", "qwen3_moe"))
    assert (spec.experts is None) == (model_type in DENSE_MODEL_TYPES)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("gemma", {}, r"model_type must be one of llama, .*, got 'gemma' in .*config\.json"),
        (None, {}, r"model_type must be one of llama, .*, got None"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act must be silu, got 'gelu'"),
        ("llama", {"attention_bias": True}, r"attention_bias must be false, got True"),
        ("llama", {"mlp_bias": True}, r"mlp_bias must be false, got True"),
        ("qwen2", {"is_causal": False}, r"is_causal must be true .*, got False in .*config\.json"),
        ("llama", {"hidden_size": "64"}, r"hidden_size must be an integer of at least 1, got '64'"),
        ("llama", {"vocab_size": True}, r"vocab_size must be an integer of at least 1, got True"),
        ("llama", {"num_hidden_layers": 0}, r"num_hidden_layers must be .* at least 1, got 0"),
        ("mistral", {"num_attention_heads": 4},
         r"num_attention_heads must be a multiple of num_key_value_heads=8, got 4"),
        ("qwen3", {"head_dim": 15}, r"head_dim must be even, got 15"),
        ("llama", {"head_dim": 0}, r"head_dim must be an integer of at least 1, got 0"),
        ("llama", {"rms_norm_eps": 0}, r"rms_norm_eps must be a positive number, got 0"),
        ("llama", {"rope_theta": None}, r"rope_theta must be a positive number, got None"),
        ("llama", {"rope_theta": float("inf")}, r"rope_theta must be a positive number, got inf"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}},
         r"rope_type must be default or llama3, got 'linear'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, r"rope_type must be .*, got 'yarn'"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
         r"rope_parameters must be one set for all layers, got \{'full_attention'"),
        ("llama", {"rope_scaling": "linear"}, r"rope_parameters must be one set .*, got 'linear'"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor must be 1, got 0\.5"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
         r"high_freq_factor must be a positive number, got None"),
        ("mistral", {"layer_types": ["full_attention"] * 3},
         r"layer_types must be absent from a mistral config, got \['full_attention'"),
        ("mistral", {"sliding_window": 0}, r"sliding_window must be .* at least 1, got 0"),
        ("qwen2", {**WINDOWED, "max_window_layers": None},
         r"max_window_layers must be an integer of at least 0, got None"),
    ],
)  # fmt: skip
def test_refusals(
    tmp_path: Path, model_type: str | None, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, model_type, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", SIZES)
def test_sizes_are_not_defaulted(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.json"
    fields = {name: value for name, value in SIZES.items() if name != key}
    path.write_text(json.dumps(fields | {"model_type": "llama"}))
    with pytest.raises(ValueError, match=rf"{key} must be set, got only .*model_type.* in .*json"):
        read_model_spec(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"base_model must hold a config\.json, got "),
        *((content, r"config\.json must be JSON, got") for content in (b"{", b"\xff\xfe", b"")),
        (b"[1]", r"config\.json must hold a JSON object, got \[1\]"),
    ],
)
def test_a_file_of_no_object_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_model_spec(tmp_path / "config.json")


@pytest.mark.parametrize("model_type", ["mistral", *QWENS])
def test_only_sequences_within_the_window_are_trained(tmp_path: Path, model_type: Any) -> None:
    window = {"sliding_window": 7}
    if model_type in QWENS:
        window |= {"use_sliding_window": True, "max_window_layers": 0}
    base = make_tiny_model(tmp_path, model_type, vocab_size=VOCAB_SIZE, **window)
    save_tiny_tokenizer(base)
    spec, tokenizer = read_model_spec(base / "config.json"), load_tokenizer(base)
    assert spec.sliding_window == 7
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "the quick brown fox jumps over a lazy dog"}) + "\n")

    def prepare(max_seq_len: int) -> None:
        job = JobSpec(
            name="long", data=DataSpec(train=str(data)), max_steps=1, max_seq_len=max_seq_len
        )
        prepare_job(job, spec, tokenizer, base=BaseModelSpec(), micro_batch_tokens=64, saved=None)

    prepare(8)  # seven rows: the last of eight tokens is only predicted
    with pytest.raises(
        ValueError,
        match=r"max_seq_len of job 'long' must be at most the model's sliding window 7, "
        r"got a sequence of 8",
    ):
        prepare(9)


@pytest.mark.parametrize(
    ("base", "total", "active"),
    [
        ("llama-3.1-8b", 8.03, 8.03),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141, 39),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
    ],
)
def test_billions_as_published(repo: Path, base: str, total: float, active: float) -> None:
    spec = read_model_spec(repo / f"configs/models/{base}.json")
    found = count_parameters(spec)
    assert found.total / 1e9 == pytest.approx(total, rel=0.003)
    assert found.active / 1e9 == pytest.approx(active, rel=0.02)
    assert (found.active == found.total) == (spec.experts is None)
