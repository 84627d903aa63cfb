"""`base_model.quantization`: what a configuration may ask for, and every refusal."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.config.sections import (
    ignored_base_settings,
    read_base_model,
    refuse_quantization,
)
from tlora_megatron.model.quantisation import base_quantisation
from tlora_megatron.model.spec import ModelSpec

ALWAYS = ["embed_tokens", "lm_head"]
FP8 = BaseModelSpec(quantization="fp8")
SPEC = ModelSpec(
    model_type="llama", num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4,
    ffn_size=16, vocab_size=32, max_positions=8, norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip


def read(folder: Path, **keys: Any) -> BaseModelSpec:
    return read_base_model({"path": str(folder), **keys}, folder)


def test_all_linears_are_quantised_by_default(tmp_path: Path) -> None:
    base = read(tmp_path, quantization="fp8")
    assert base.unquantised == tuple(ALWAYS)
    found = base_quantisation(base, SPEC)
    assert found is not None
    assert found.kind == "channel"
    assert not found.published
    assert len(found.linears) == 4 * SPEC.num_layers
    assert base_quantisation(replace(base, quantization=None), SPEC) is None


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["down_proj"], {(0, "linear_fc2"), (1, "linear_fc2")}),
        (["layers.1.o_proj"], {(1, "linear_proj")}),
        (["layers.1.up_proj", "layers.1.gate_proj"], {(1, "linear_fc1")}),
        (["layers.0"], {(0, f"linear_{name}") for name in ("qkv", "proj", "fc1", "fc2")}),
    ],
)
def test_listed_linears_stay(tmp_path: Path, names: list[str], left: set[Any]) -> None:
    base = read(tmp_path, quantization="fp8", unquantised=[*ALWAYS, *names])
    found = base_quantisation(base, SPEC)
    assert found is not None
    assert not found.linears & left
    assert len(found.linears) == 4 * SPEC.num_layers - len(left)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quantization": "int8"}, "base_model.quantization must be one of fp8, got 'int8'"),
        ({"unquantised": ["embed_tokens"]},
         "base_model.unquantised must hold lm_head, which has no FP8 kernels, got "
         "['embed_tokens']"),
        ({"unquantised": [*ALWAYS, "down"]},
         "base_model.unquantised[2] must be one of embed_tokens, lm_head, q_proj, k_proj, "
         "v_proj, o_proj, gate_proj, up_proj, down_proj, layers.N or layers.N.TARGET, got "
         "'down'; did you mean down_proj?"),
        ({"unquantised": [*ALWAYS, "layers.0.lm_head"]}, "[2] must be one of embed_tokens"),
        ({"unquantised": [*ALWAYS, "layers.3.q_proj", "v_proj", "k_proj"]},
         "must name q_proj, k_proj, v_proj together: they are one GEMM"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(tmp_path, **keys)


def test_a_layer_that_the_model_lacks_is_refused() -> None:
    base = replace(FP8, unquantised=(*ALWAYS, "layers.2.o_proj"))
    match = r"base_model.unquantised must name layers 0 to 1, got layers.2.o_proj"
    with pytest.raises(ValueError, match=match):
        base_quantisation(base, SPEC)


def test_other_trainers_refuse_it_by_name() -> None:
    match = r"base_model.quantization must be null under DeepSpeed, got 'fp8'; `tlora train` has it"
    with pytest.raises(ConfigError, match=match):
        refuse_quantization(FP8, "DeepSpeed")
    refuse_quantization(BaseModelSpec(), "DeepSpeed")


def test_a_list_without_quantization_has_no_effect() -> None:
    base = BaseModelSpec(unquantised=(*ALWAYS, "layers.0"))
    assert ignored_base_settings(base) == [
        "base_model.unquantised has no effect without quantization"
    ]
