"""Bases with experts: stored names and shapes, a rank's part, and gpt-oss's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from tests.helpers.tiny_models import TINY_EXPERT_TYPES, TinyModelType, make_tiny_model, to_mxfp4
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.training.formats.hf_checkpoint import GptOssExperts, HFCheckpoint, decode_mxfp4
from tlora_megatron.training.formats.hf_convert import check_layout, check_weights, hf_shapes
from tlora_megatron.training.formats.megatron_flags import megatron_flags
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


def test_processes_of_a_stage_are_shared_out(tmp_path: Path) -> None:
    sizes = {"tp_size": 2, "pp_size": 2, "cp_size": 1}
    make = ParallelLayout.for_world
    assert make(8, **sizes, sequence_parallel=True, ep_size=2).expert_tp == 2
    assert make(4, **sizes, sequence_parallel=True, ep_size=2, expert_tp_size=1).expert_tp == 1
    with pytest.raises(ValueError, match=r"a multiple of ep_size . expert_tp_size = 4, got 2"):
        make(4, **sizes, sequence_parallel=True, ep_size=2)


def test_flags(tmp_path: Path) -> None:
    spec = read_model_spec(make_tiny_model(tmp_path, "qwen3_moe") / "config.json")
    words = megatron_flags(spec)
    for flag, value in (("--num-experts", "4"), ("--moe-router-topk", "2")):
        assert words[words.index(flag) + 1] == value
    assert words[words.index("--moe-router-load-balancing-type") + 1] == "none"
    assert "--moe-router-pre-softmax" not in words


CPU = torch.device("cpu")
EXPERTS = "model.layers.1.mlp.experts"


def source(directory: Path) -> GptOssExperts:
    return GptOssExperts(HFCheckpoint(directory), CPU)


@pytest.fixture(params=["plain", "mxfp4"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make_tiny_model(tmp_path, "gpt_oss", num_hidden_layers=2)
    if request.param == "mxfp4":
        to_mxfp4(tmp_path)
    return tmp_path


def test_every_expert_is_what_transformers_has(base: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).model.layers[1].mlp
    experts, read = module.experts, source(base).read
    for number in range(4):
        name = f"{EXPERTS}.{number}"
        for turn, part in enumerate(("gate_proj", "up_proj")):
            weight = experts.gate_up_proj[number].T[turn::2]
            assert torch.equal(read(f"{name}.{part}.weight"), weight)
            bias = experts.gate_up_proj_bias[number, turn::2]
            assert torch.equal(read(f"{name}.{part}.bias"), bias)
        down = experts.down_proj[number].T
        assert torch.equal(read(f"{name}.down_proj.weight"), down)
        assert torch.equal(read(f"{name}.down_proj.bias"), experts.down_proj_bias[number])
        part = read(f"{name}.down_proj.weight", slice(3, 20), slice(16, 64))
        assert torch.equal(part, down[3:20, 16:64])
    router = "model.layers.1.mlp.router.weight"
    assert torch.equal(read(router), module.router.weight)


def test_shapes_are_those_of_the_architecture(base: Path) -> None:
    spec = read_model_spec(base / "config.json")
    check_weights(spec, source(base))
    source(base).check_counts(2, 4)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj must hold 3 experts, got 4"):
        source(base).check_counts(2, 3)
    with pytest.raises(ValueError, match=r"experts.down_proj must hold expert 4, got 4"):
        source(base).shape(f"{EXPERTS}.4.down_proj.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp4_is_decoded_as_by_transformers(dtype: torch.dtype) -> None:
    """All codes under all scales but that of NaN; in float16 some values are too large or small."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    expected = _convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].T
    got = decode_mxfp4(blocks[0], scales[0]).to(dtype)
    assert got.shape == (255, 512)
    assert torch.equal(got, expected)
    assert len(got[127].unique()) == 15, "a half and its neighbours, and one zero"


def rewrite(base: Path, name: str, value: Tensor | None) -> None:
    """Puts another tensor in the place of one of layer 1; None removes it."""
    tensors = load_file(base / "model.safetensors")
    del tensors[f"{EXPERTS}.{name}"]
    if value is not None:
        tensors[f"{EXPERTS}.{name}"] = value
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "gpt_oss", num_hidden_layers=2)
    rewrite(tmp_path, "down_proj", torch.full((4, 96, 64), float("nan")))
    with pytest.raises(ValueError, match=r"down_proj of .* must be finite, got NaN or infinity"):
        source(tmp_path).read(f"{EXPERTS}.0.down_proj.weight")
    rewrite(tmp_path, "down_proj", torch.zeros(4, 64))
    with pytest.raises(ValueError, match=r"down_proj must have 3 dimensions, got shape \[4, 64\]"):
        source(tmp_path).shape(f"{EXPERTS}.0.down_proj.weight")
    rewrite(tmp_path, "gate_up_proj_bias", None)
    with pytest.raises(ValueError, match=r"must hold the tensor .*experts.gate_up_proj_bias"):
        check_weights(read_model_spec(tmp_path / "config.json"), source(tmp_path))


def test_damaged_codes_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "gpt_oss", num_hidden_layers=2)
    to_mxfp4(tmp_path)
    name = f"{EXPERTS}.0.down_proj.weight"
    rewrite(tmp_path, "down_proj_scales", torch.full((4, 64, 3), 255, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"down_proj_scales of .* must be finite, got NaN"):
        source(tmp_path).read(name)
    rewrite(tmp_path, "down_proj_scales", torch.zeros(4, 64, 3))
    with pytest.raises(ValueError, match=r"down_proj_scales must be U8, got F32"):
        source(tmp_path).shape(name)
    rewrite(tmp_path, "down_proj_scales", torch.zeros(4, 64, 2, dtype=torch.uint8))
    rule = r"all but the last of it, got \[4, 64, 3, 16\] and \[4, 64"
    with pytest.raises(ValueError, match=rule):
        source(tmp_path).shape(name)
