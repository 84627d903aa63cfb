"""gpt-oss: its `config.json` means what transformers reads in it, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from tests.helpers.tiny_models import tiny_config
from tests.unit.model.test_model import assert_same_sizes
from tests.unit.model.test_model import read as read_any
from tlora_megatron.cli.main import main
from tlora_megatron.config.job import DataSpec, JobSpec, LoraSpec
from tlora_megatron.model.backbone import over_base
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.quantisation import read_published_format
from tlora_megatron.model.spec import GPT_OSS, ClampedGlu, ModelSpec, count_parameters
from tlora_megatron.ops.frozen.rotary import inverse_frequencies, rotary_factor
from tlora_megatron.planner.cost.experts import check_predictable

PUBLISHED = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": False,
}  # fmt: skip
"""`rope_scaling` of the released files."""
FULL, SLIDING = "full_attention", "sliding_attention"


def read(tmp_path: Path, *, model_type: str = GPT_OSS, **fields: Any) -> ModelSpec:
    return read_any(tmp_path, model_type, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_scaling": PUBLISHED, "rope_theta": 150000, "initial_context_length": 4096},
        {"rope_scaling": PUBLISHED | {"truncate": True}, "rope_theta": 1e4},
        {"rope_scaling": PUBLISHED | {"attention_factor": 1.5}},
        {"rope_scaling": PUBLISHED | {"factor": 0.5, "beta_fast": 4.0, "beta_slow": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
        {"head_dim": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-6},
        {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 9},
        {"layer_types": [FULL] * 3, "sliding_window": None},
        {"num_local_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 5.0},
        {"tie_word_embeddings": True, "max_position_embeddings": 512},
    ],
    ids=str,
)
def test_a_file_means_what_transformers_reads(tmp_path: Path, fields: dict[str, Any]) -> None:
    spec = read(tmp_path, **fields)
    config = AutoConfig.from_pretrained(tmp_path)
    attention, experts = spec.gpt_oss, spec.experts
    assert attention is not None
    assert experts is not None
    windows = [config.sliding_window if kind == SLIDING else None for kind in config.layer_types]
    assert attention.windows == tuple(windows)
    assert spec.sliding_window is None  # sequences may be longer
    assert_same_sizes(spec, config)
    assert (experts.num_experts, experts.top_k, experts.ffn_size) == (
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
    )
    assert experts.glu == ClampedGlu(alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    rotary = GptOssRotaryEmbedding(config)
    assert torch.equal(inverse_frequencies(spec), rotary.inv_freq)
    assert rotary_factor(spec) == rotary.attention_scaling


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": False}, "attention_bias must be true, got False in .*config.json"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0 in a frozen base, got 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"layer_types": [FULL]}, "layer_types must be full_attention or sliding_attention for"),
        ({"layer_types": [FULL, FULL, "chunked"]}, "for each of 3 layers, got .*chunked"),
        ({"sliding_window": None}, "sliding_window must be an integer of at least 1, got None"),
        ({"rope_scaling": {"rope_type": "linear"}}, "must be default, llama3 or yarn, got 'lin"),
        ({"rope_scaling": PUBLISHED | {"factor": None}}, "factor must be a positive number, got N"),
        ({"rope_scaling": PUBLISHED | {"mscale": 1.0}}, "mscale must be absent from rope_param"),
        ({"rope_scaling": PUBLISHED | {"truncate": "no"}}, "truncate must be true or false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
         "original_max_position_embeddings must be an integer of at least 1, got None"),
        ({"swiglu_limit": 0}, "swiglu_limit must be a positive number, got 0"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok must be at most 128, got 200"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **fields)


def test_experts_carry_no_adapters(tmp_path: Path) -> None:
    spec = read(tmp_path)
    job = JobSpec(name="a", data=DataSpec(train="a.jsonl"), lora=LoraSpec(), max_steps=1)
    with pytest.raises(
        ValueError,
        match="target_modules of job 'a' must be among q_proj, k_proj, v_proj, o_proj over a base "
        "of model_type gpt_oss, whose experts carry no adapters yet, got gate_proj",
    ):
        over_base(job, spec)


def test_mxfp4_is_no_quantisation_of_the_run(tmp_path: Path) -> None:
    stated = {"quant_method": "mxfp4"}
    read(tmp_path, quantization_config=stated)
    assert read_published_format(tmp_path / "config.json") is None
    read(tmp_path, model_type="llama", quantization_config=stated)
    with pytest.raises(ValueError, match="quant_method must be compressed-tensors or fp8"):
        read_published_format(tmp_path / "config.json")


def test_parameters_are_counted(tmp_path: Path) -> None:
    config = tiny_config("gpt_oss")
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    found = count_parameters(read_model_spec(tmp_path / "config.json"))
    assert found.total == sum(parameter.numel() for parameter in model.parameters())
    GptOssConfig().save_pretrained(tmp_path)  # the larger one, by its defaults
    found = count_parameters(read_model_spec(tmp_path / "config.json"))
    assert found.total / 1e9 == pytest.approx(116.8, rel=0.001)
    tables = 201088 * 2880  # the published number counts one table of the vocabulary
    assert (found.active - tables) / 1e9 == pytest.approx(5.13, rel=0.002)


def test_it_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read(tmp_path)
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    written = " ".join(capsys.readouterr().err.split())
    assert "a base that is converted must not be of model_type gpt_oss yet, got one" in written


def test_nothing_predicts_its_time_and_memory(tmp_path: Path) -> None:
    spec = read(tmp_path)
    with pytest.raises(ValueError, match="the base of a prediction must not be of model_type gpt"):
        check_predictable(spec, [])
