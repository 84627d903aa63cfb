"""A base that is quantised on its way to a GPU: the codes of the CPU, and no wide weight there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.fp8_folders import make_fp8_folder
from tests.helpers.tiny_models import make_tiny_model
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.integrations.megatron import model as backbone
from tlora_megatron.layers.quantised_linear import quantised_linears
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import base_quantisation
from tlora_megatron.ops.quantised.weight import QuantWeight
from tlora_megatron.training.formats import base_reader
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint
from tlora_megatron.training.formats.hf_convert import hf_shapes
from tlora_megatron.training.formats.rank_tensors import rank_tensors

LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "head_dim": 128}
LARGE |= {"num_attention_heads": 16, "num_key_value_heads": 8}


pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("groups")]


def build(directory: Path) -> dict[str, QuantWeight]:
    spec, layout = read_model_spec(directory / "config.json"), ParallelLayout()
    quantisation = base_quantisation(BaseModelSpec(path=str(directory), quantization="fp8"), spec)
    model = backbone.build_backbone(spec, layout, dtype=torch.bfloat16, quantisation=quantisation)
    backbone.load_backbone(model, spec, directory, layout, quantisation=quantisation)
    return dict(quantised_linears(model))


def read_on_cpu(directory: Path) -> dict[str, tuple[Tensor, Tensor]]:
    spec = read_model_spec(directory / "config.json")
    part: dict[str, Any] = {"tp_rank": 0, "tp_size": 1, "layers": range(spec.num_layers)}
    tensors = list(rank_tensors(spec, **part, with_embedding=False, with_output=False))
    tensors = [t for t in tensors if ".linear_" in t.name and t.name.endswith("weight")]
    codes = {t.name: torch.empty(t.shape, dtype=torch.uint8) for t in tensors}
    scales = {t.name: torch.empty(t.shape[0]) for t in tensors}
    base_reader.read_base(HFCheckpoint(directory), tensors, codes, scales)
    return {name: (codes[name], scales[name]) for name in codes}


@pytest.mark.parametrize("block_bytes", [1800, 1 << 20])
def test_codes_are_those_of_the_cpu(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path, "qwen2", vocab_size=127, num_shards=2)
    expected = read_on_cpu(directory)
    monkeypatch.setattr(base_reader, "_BLOCK_BYTES", block_bytes)
    found = build(directory)
    assert {f"{name}.weight" for name in found} == expected.keys()
    for name, weight in found.items():
        codes, scales = expected[f"{name}.weight"]
        assert torch.equal(weight.codes_NK.cpu(), codes), name
        assert torch.equal(weight.scales.cpu(), scales), name


@pytest.mark.parametrize("kind", ["channel", "fp8", "ue8m0"])
def test_a_published_folder_is_read(tmp_path: Path, kind: Any) -> None:
    for name, weight in build(make_fp8_folder(tmp_path, kind)).items():
        assert weight.codes_NK.is_cuda, name
        assert weight.scales.isfinite().all(), name


def test_the_peak_is_codes_and_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_reader, "_BLOCK_BYTES", 1 << 20)  # those of small models are large
    directory = make_tiny_model(tmp_path, "llama", vocab_size=128, **LARGE)
    spec = read_model_spec(directory / "config.json")
    weights = sum(math.prod(shape) for shape in hf_shapes(spec).values())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = build(directory)
    peak = torch.cuda.max_memory_allocated() - before
    assert sum(weight.codes_NK.nbytes for weight in held.values()) > 0.99 * weights
    # Eight threads have a block as stored each. One at a time has it in fp32, too, its codes, and
    # its values again, without and with their scales. A linear of the MLP would be 32 or 64 blocks.
    assert peak < 1.01 * weights + 16 * base_reader._BLOCK_BYTES
