"""Bases with experts: stored names and shapes, a rank's part, and gpt-oss's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.tiny_models import TINY_EXPERT_TYPES, TinyModelType, make_tiny_model
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint
from tlora_megatron.training.formats.hf_convert import check_layout, check_weights, hf_shapes
from tlora_megatron.training.formats.rank_tensors import ExpertShare, rank_tensors


@pytest.mark.parametrize("model_type", TINY_EXPERT_TYPES)
def test_names_and_shapes_are_transformers_s(tmp_path: Path, model_type: TinyModelType) -> None:
    base = make_tiny_model(tmp_path, model_type)
    spec = read_model_spec(base / "config.json")
    stored = load_file(base / "model.safetensors")
    assert hf_shapes(spec) == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    check_weights(spec, HFCheckpoint(base))
    layers = sum(t.numel() for n, t in stored.items() if "layers" in n and t.dim() == 2)
    assert spec.num_layers * spec.layer_weights == layers


def test_a_rank_reads_its_experts_rows(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path, "mixtral")
    spec, source = read_model_spec(base / "config.json"), HFCheckpoint(base)
    part = rank_tensors(
        spec, tp_rank=0, tp_size=2, layers=range(1, 2), with_embedding=False, with_output=False,
        experts=ExpertShare(range(2, 4), 1, 2),
    )  # fmt: skip
    tensors = {tensor.name: tensor for tensor in part if ".mlp." in tensor.name}
    into, out = (f"decoder.layers.0.mlp.experts.linear_fc{n}.weight1" for n in (1, 2))
    assert tensors.keys() == {"decoder.layers.0.mlp.router.weight", into, out} | {
        name.replace("weight1", "weight0") for name in (into, out)
    }
    assert (tensors[into].shape, tensors[out].shape) == ((96, 64), (64, 48))
    up = tensors[into].pieces[1]
    assert up.source == "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    assert torch.equal(source.read(up.source, up.rows), source.read(up.source)[48:])


def test_layouts(tmp_path: Path) -> None:
    spec = read_model_spec(make_tiny_model(tmp_path, "mixtral") / "config.json")
    check_layout(spec, ParallelLayout(tp_size=4, expert_tp_size=1))
    with pytest.raises(ValueError, match="num_experts must be a multiple of ep_size=3, got"):
        check_layout(spec, ParallelLayout(ep_size=3, dp_size=3))


def test_processes_of_a_stage_are_shared_out() -> None:
    layout = ParallelLayout(tp_size=2, pp_size=2, sequence_parallel=True, ep_size=2)
    assert layout.for_world(8).expert_tp == 2
    assert replace(layout, expert_tp_size=1).for_world(4).expert_tp == 1
    with pytest.raises(ValueError, match=r"a multiple of ep_size . expert_tp_size = 4, got 2"):
        layout.for_world(4)
