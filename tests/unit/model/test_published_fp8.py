"""`quantization_config` of published folders: what is read of it, and every refusal by name."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fp8_folders import Format, statement
from tlora_megatron.model.quantisation import (
    PublishedFormat,
    read_published_format,
    refuse_published,
)


def read(folder: Path, stated: Any) -> PublishedFormat | None:
    path = folder / "config.json"
    path.write_text(json.dumps({"quantization_config": stated}))
    return read_published_format(path)


@pytest.mark.parametrize(
    ("kind", "strategy", "scale"),
    [
        ("channel", "channel", "weight_scale"),
        ("tensor", "tensor", "weight_scale"),
        ("block", "block", "weight_scale"),
        ("fp8", "block", "weight_scale_inv"),
        ("ue8m0", "block", "weight_scale_inv"),
    ],
)
def test_what_a_folder_states(tmp_path: Path, kind: Format, strategy: str, scale: str) -> None:
    found = read(tmp_path, statement(kind))
    assert found is not None
    assert (found.strategy, found.scale) == (strategy, scale)
    assert found.rounds_scales == (kind == "ue8m0")
    assert found.quantises("model.layers.0.mlp.down_proj")
    assert found.quantises("model.layers.11.mlp.down_proj")
    assert not found.quantises("model.layers.1.mlp.down_proj")


@pytest.mark.parametrize(
    ("entry", "left"),
    [
        ("model.layers.0", True),
        ("model.layers.0.mlp.up_proj", True),
        ("re:.*up_proj$", True),
        ("model.layers.0.mlp.up", False),
        ("re:up_proj", False),  # matched from the beginning
        ("Linear", True),
        ("up_proj", False),
    ],
)
def test_entries_name_modules(tmp_path: Path, entry: str, left: bool) -> None:
    stated = statement("channel") | {"ignore": [entry]}
    found = read(tmp_path, stated)
    assert found is not None
    assert found.quantises("model.layers.0.mlp.up_proj") != left


def test_entries_of_quant_method_fp8_may_be_parts_of_names(tmp_path: Path) -> None:
    found = read(tmp_path, statement("fp8") | {"modules_to_not_convert": ["down_proj", "layers.3"]})
    assert found is not None
    assert not found.quantises("model.layers.0.mlp.down_proj")
    assert not found.quantises("model.layers.3.mlp.up_proj")
    assert found.quantises("model.layers.31.mlp.up_proj")


def test_a_foreign_trainer_refuses_the_folder(tmp_path: Path) -> None:
    read(tmp_path, statement("fp8"))
    match = r"base_model.path must hold weights that are not quantised under DeepSpeed, got FP8"
    with pytest.raises(ValueError, match=match):
        refuse_published(tmp_path / "config.json", "DeepSpeed")
    other = {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(other))
    refuse_published(tmp_path / "config.json", "DeepSpeed")


def test_a_folder_that_states_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, None) is None
    assert read_published_format(tmp_path / "none.json") is None


GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("fp8", "quant_method", "gptq", "quant_method must be compressed-tensors or fp8"),
        ("fp8", "quant_method", "bitsandbytes", "quant_method must be compressed-tensors or fp8"),
        ("fp8", "fmt", "e5m2", 'fmt must be e4m3, got "e5m2"'),
        ("fp8", "fmt", "e4m3fnuz", 'fmt must be e4m3, got "e4m3fnuz"'),
        ("fp8", "activation_scheme", "static", "activation_scheme must be dynamic"),
        ("fp8", "weight_block_size", [64, 128], "weight_block_size must be [128, 128]"),
        ("fp8", "weight_block_size", None, "weight_block_size must be [128, 128], got null"),
        ("fp8", "scale_fmt", "e5m2", "scale_fmt must be ue8m0 or absent"),
        ("fp8", "modules_to_not_convert", "lm_head", "modules_to_not_convert must be a list of"),
        ("fp8", "kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme must be null"),
        ("channel", "format", "pack-quantized", "format must be float-quantized, got"),
        ("channel", "kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme must be null"),
        ("channel", "sparsity_config", {"format": "24"}, "sparsity_config must be empty"),
        ("channel", "transform_config", {"u": 1}, "transform_config must be empty"),
        ("channel", "config_groups", {}, "config_groups must hold a group, got {}"),
        ("channel", "ignore", ["re:("], "ignore must hold regular expressions"),
        ("channel", f"{GROUP}.format", "int-quantized", f"{GROUP}.format must be float-quantized"),
        ("channel", f"{GROUP}.weights", None, f"{GROUP}.weights must be 8-bit floats, got null"),
        ("channel", f"{GROUP}.weights.num_bits", 4, f"{GROUP}.weights.num_bits must be 8, got 4"),
        ("channel", f"{GROUP}.weights.type", "int", f'{GROUP}.weights.type must be "float", got'),
        ("channel", f"{GROUP}.weights.symmetric", False, "weights.symmetric must be true, got"),
        ("channel", f"{GROUP}.weights.dynamic", True, "weights.dynamic must be false, got true"),
        ("channel", f"{GROUP}.weights.actorder", "group", "weights.actorder must be null"),
        ("channel", f"{GROUP}.weights.strategy", "group",
         "weights.strategy must be channel, tensor or block, got"),
        ("block", f"{GROUP}.weights.block_structure", [1, 128], "block_structure must be [128, 12"),
        ("channel", f"{GROUP}.input_activations", None, "input_activations must be 8-bit floats"),
        ("channel", f"{GROUP}.input_activations.dynamic", False,
         f"{GROUP}.input_activations.dynamic must be true, got false"),
        ("channel", f"{GROUP}.input_activations.strategy", "tensor",
         f"{GROUP}.input_activations.strategy must be token with weights of strategy channel"),
        ("block", f"{GROUP}.input_activations.group_size", 64, "group_size must be 128, got 64"),
        ("channel", f"{GROUP}.output_activations", {"a": 1}, "output_activations must be null"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, kind: Format, path: str, value: Any, message: str) -> None:
    stated: Any = copy.deepcopy(statement(kind))
    *parents, last = path.split(".")
    node = stated
    for key in parents:
        node = node[key]
    node[last] = value
    match = rf"{re.escape(message)}.* in quantization_config of .*config\.json$"
    with pytest.raises(ValueError, match=match):
        read(tmp_path, stated)


def test_groups_of_different_strategies_are_refused(tmp_path: Path) -> None:
    stated = copy.deepcopy(statement("channel"))
    stated["config_groups"]["group_1"] = statement("block")["config_groups"]["group_0"]
    match = r'config_groups must have one strategy for weights, got \["block", "channel"\]'
    with pytest.raises(ValueError, match=match):
        read(tmp_path, stated)
