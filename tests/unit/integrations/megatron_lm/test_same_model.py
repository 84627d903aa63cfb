"""Built models are held to config.json field by field, and to the fingerprint of the checkpoint
that Megatron loads.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from tests.helpers.tiny_models import tiny_config
from tlora_megatron.integrations.megatron_lm.experts import set_rotary_frequencies
from tlora_megatron.integrations.megatron_lm.guard import RULES
from tlora_megatron.integrations.megatron_lm.same_model import (
    COMPARED,
    check_transformer_config,
    checkpoint_of_convert,
    is_judged,
    precision_of,
    without_quantization,
)
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.frozen.rotary import inverse_frequencies

BUILDER_ARGUMENTS = {
    "compared": {*("padded_vocab_size", "rotary_base", "untie_embeddings_and_output_weights"),
     "use_rope_scaling"},
    "chooses a specification, whose linears `discover` checks": {"spec", "transformer_impl"},
    "a TransformerConfig by another way, checked when the model stands": {"yaml_cfg"},
    "rope has no end": {"max_position_embeddings"},
    "the mean of losses that are not the jobs'": {"fp16_lm_cross_entropy", "logit_dtype"},
    "how many rows fill the vocabulary up": {"make_vocab_size_divisible_by", "vocab_size"},
    "num_moe_experts of TransformerConfig": {"num_experts"},
}  # fmt: skip
"""Arguments that Megatron-LM's builders read beside the fields of TransformerConfig."""
BUILDERS = ("gpt_builders.py", "megatron/training/argument_utils.py")


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    tiny_config("llama").save_pretrained(tmp_path)
    return read_model_spec(tmp_path / "config.json")


def config_of(spec: ModelSpec, **fields: Any) -> TransformerConfig:
    shape: dict[str, Any] = {
        "num_layers": spec.num_layers, "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads, "activation_func": F.silu, "gated_linear_unit": True,
    }  # fmt: skip
    return TransformerConfig(**(shape | fields))


def test_every_field_of_the_configuration_is_judged() -> None:
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    unknown = [name for name in fields if not is_judged(name)]
    assert unknown == [], "say in same_model.py what each of them does to the model"
    assert set(COMPARED) <= fields


@pytest.mark.megatron_lm
def test_every_argument_of_the_builder_is_judged() -> None:
    files = [Path(os.environ["MEGATRON_LM_PATH"], name) for name in BUILDERS]
    functions = [
        function
        for file in files
        if file.is_file()
        for function in ast.walk(ast.parse(file.read_text()))
        if getattr(function, "name", "") in ("gpt_builder", "gpt_config_from_args")
    ]
    read = {
        node.attr
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "args"
    }
    assert "rotary_base" in read
    judged = {*{rule.argument for rule in RULES}}.union(*BUILDER_ARGUMENTS.values())
    assert {name for name in read if name not in judged and not is_judged(name)} == set()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, None),
        ({"softmax_scale": 8**-0.5}, None),
        ({"softmax_scale": 1.0}, "--softmax-scale must be absent or 0.35"),
        ({"activation_func": F.gelu}, "activation of the MLP .* must be silu as in .* got gelu"),
        ({"gated_linear_unit": False}, "--swiglu must be on"),
        ({"num_moe_experts": 4}, "--num-experts must be absent as in c.json, got 4"),
    ],
)
def test_held_to_the_file(spec: ModelSpec, fields: dict[str, Any], message: str | None) -> None:
    config = config_of(spec, **fields)
    if message is None:
        check_transformer_config(config, spec, Path("c.json"))
        return
    with pytest.raises(ValueError, match=message):
        check_transformer_config(config, spec, Path("c.json"))


def test_a_newer_version_s_field_is_told(spec: ModelSpec, caplog: pytest.LogCaptureFixture) -> None:
    newer = dataclasses.make_dataclass("Newer", [("logit_soft_cap", float, 0.0)])
    check_transformer_config(newer(), spec, Path("c.json"))
    assert not caplog.text
    check_transformer_config(newer(30.0), spec, Path("c.json"))
    assert "logit_soft_cap=30.0" in caplog.text


SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def built(frequencies: torch.Tensor) -> Any:
    rotary = SimpleNamespace(inv_freq=frequencies)
    return SimpleNamespace(rotary_pos_emb=rotary, position_embedding_type="rope")


@pytest.mark.parametrize("left_out", [{**SCALING, "factor": 8.0}, None])
def test_rope_scaling_that_the_script_left_out_is_set(
    spec: ModelSpec, left_out: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = replace(spec, head_dim=64, rope_theta=500000.0, rope_scaling=SCALING)
    model = built(inverse_frequencies(replace(wanted, rope_scaling=left_out)))
    set_rotary_frequencies(model, wanted)
    assert torch.equal(model.rotary_pos_emb.inv_freq, inverse_frequencies(wanted))
    assert "--rope-scaling-factor 32 is set" in caplog.text


def test_frequencies_that_are_right_are_left_as_they_are(spec: ModelSpec) -> None:
    own = inverse_frequencies(spec) * (1 + 1e-7)
    model = built(own)
    set_rotary_frequencies(model, spec)
    assert model.rotary_pos_emb.inv_freq is own


def test_frequencies_that_nobody_asked_for_are_refused(spec: ModelSpec) -> None:
    model = built(inverse_frequencies(replace(spec, rope_theta=1e6)))
    with pytest.raises(ValueError, match="must be those of --rotary-base 10000"):
        set_rotary_frequencies(model, spec)


@pytest.fixture(autouse=True)
def trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM's own question whether a folder holds a checkpoint."""

    def checkpoint_exists(folder: Any) -> bool:
        return folder is not None and (Path(folder) / "latest_checkpointed_iteration.txt").exists()

    module = SimpleNamespace(checkpoint_exists=checkpoint_exists)
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(checkpointing=module))
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", module)


def folder(root: Path, name: str, tracker: str) -> str:
    (root / name).mkdir()
    (root / name / "latest_checkpointed_iteration.txt").write_text(tracker)
    return str(root / name)


def arguments(load: str | None, pretrained: str | None, **fields: Any) -> argparse.Namespace:
    return argparse.Namespace(load=load, pretrained_checkpoint=pretrained, **fields)


def test_it_is_the_folder_that_megatron_loads(tmp_path: Path) -> None:
    one, other = folder(tmp_path, "one", "release"), folder(tmp_path, "other", "release\n")
    assert checkpoint_of_convert(arguments(one, other)) == Path(one)
    assert checkpoint_of_convert(arguments(None, other)) == Path(other)
    assert checkpoint_of_convert(arguments(str(tmp_path / "none"), other)) == Path(other)
    assert checkpoint_of_convert(arguments(None, None)) is None


def test_weights_that_were_trained_on_are_not_the_base_s(tmp_path: Path) -> None:
    trained, release = folder(tmp_path, "trained", "100"), folder(tmp_path, "release", "release")
    assert checkpoint_of_convert(arguments(trained, release)) is None
    assert checkpoint_of_convert(arguments(release, None, ckpt_step=100)) is None
    assert checkpoint_of_convert(arguments(release, None, ckpt_step=None)) == Path(release)


@pytest.mark.parametrize(
    ("fields", "precision"),
    [
        ({"bf16": False}, "float32"),
        ({"bf16": True, "fp8_param_gather": False}, "bfloat16"),
        ({"bf16": True, "fp8_param_gather": True}, "fp8"),
    ],
)
def test_the_precision_is_that_of_the_weights(fields: dict[str, Any], precision: str) -> None:
    assert precision_of(arguments(None, None, **fields)) == precision


def test_fp8_is_off_while_the_base_is_scored() -> None:
    config = SimpleNamespace(fp8="hybrid", fp4=None)
    layer = nn.Linear(1, 1)
    layer.config = config  # type: ignore[assignment]
    model: Any = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([layer])
    model.config = config
    with without_quantization([model]):
        assert config.fp8 is None
    assert (config.fp8, config.fp4) == ("hybrid", None)
