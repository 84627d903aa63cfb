"""Hugging Face's weights as Megatron's tensors, those of experts too, and what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.base_case import converted
from tests.helpers.tiny_models import (
    TINY_EXPERT_TYPES,
    TINY_MODEL_TYPES,
    TinyModelType,
    make_tiny_model,
)
from tlora_megatron.layers.sites import fc1_row_order, qkv_row_order
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, RandomWeights, WeightSource
from tlora_megatron.training.formats.hf_convert import check_layout, check_weights, hf_shapes
from tlora_megatron.training.formats.rank_tensors import ExpertShare, rank_tensors, shard_range

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
HEAD = "lm_head.weight"

SMALL = ModelSpec(
    model_type="llama", num_layers=2, hidden_size=6, num_heads=4, num_kv_heads=2, head_dim=2,
    ffn_size=4, vocab_size=5, max_positions=8, norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "llama", vocab_size=127)


@pytest.fixture
def spec(directory: Path) -> ModelSpec:
    return read_model_spec(directory / "config.json")


def test_qkv_rows_go_group_by_group() -> None:
    # q heads 0..3 are rows 0-7, k heads rows 8-11, v heads rows 12-15; two q heads a group.
    group_0 = [0, 1, 2, 3, 8, 9, 12, 13]
    group_1 = [4, 5, 6, 7, 10, 11, 14, 15]
    assert qkv_row_order(SMALL).tolist() == group_0 + group_1
    assert qkv_row_order(SMALL, 0, 2).tolist() == group_0
    assert qkv_row_order(SMALL, 1, 2).tolist() == group_1


def test_fc1_rows_are_gate_then_up_on_every_rank() -> None:
    assert fc1_row_order(SMALL).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert fc1_row_order(SMALL, 0, 2).tolist() == [0, 1, 4, 5]
    assert fc1_row_order(SMALL, 1, 2).tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize("model_type", TINY_MODEL_TYPES)
def test_ranks_together_hold_every_weight_once(tmp_path: Path, model_type: TinyModelType) -> None:
    directory = make_tiny_model(tmp_path, model_type, num_shards=2)
    spec, source = read_model_spec(directory / "config.json"), HFCheckpoint(directory)
    ranks = [converted(spec, source, rank, 2) for rank in range(2)]
    layer = "model.layers.3.self_attn."
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        whole = torch.cat([source.read(f"{layer}{part}_proj.{kind}") for part in "qkv"])
        for rank, held in enumerate(ranks):
            name = f"decoder.layers.3.self_attention.linear_qkv.{kind}"
            torch.testing.assert_close(held[name], whole[qkv_row_order(spec, rank, 2)])
    gate_up = [source.read(f"model.layers.0.mlp.{part}_proj.weight") for part in ("gate", "up")]
    for rank, held in enumerate(ranks):
        rows = torch.cat(gate_up)[fc1_row_order(spec, rank, 2)]
        torch.testing.assert_close(held["decoder.layers.0.mlp.linear_fc1.weight"], rows)
    for megatron, hf, dim in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight", 0),
        ("decoder.layers.1.self_attention.linear_proj.weight", O_PROJ, 1),
        ("decoder.layers.1.mlp.linear_fc2.weight", "model.layers.1.mlp.down_proj.weight", 1),
        ("output_layer.weight", HEAD, 0),
    ):
        joined = torch.cat([held[megatron] for held in ranks], dim=dim)
        torch.testing.assert_close(joined, source.read(hf))
    elements = sum(t.numel() for held in ranks for n, t in held.items() if "norm" not in n)
    norms = sum(t.numel() for n, t in ranks[1].items() if "norm" in n)
    assert elements + norms == sum(source.read(name).numel() for name in source.keys())  # noqa: SIM118


def test_vocabulary_is_padded_with_zero_rows(directory: Path, spec: ModelSpec) -> None:
    source = HFCheckpoint(directory)
    ranks = [converted(spec, source, rank, 4)["output_layer.weight"] for rank in range(4)]
    assert [len(rows) for rows in ranks] == [32, 32, 32, 32]
    torch.testing.assert_close(torch.cat(ranks)[:127], source.read(HEAD))
    assert not ranks[3][31].any()


def test_a_vocabulary_smaller_than_a_ranks_rows_leaves_ranks_empty() -> None:
    spec = replace(SMALL, vocab_size=2, num_heads=4, num_kv_heads=4, ffn_size=4)
    source = RandomWeights(hf_shapes(spec), seed=0, device=torch.device("cpu"), dtype=torch.float32)
    last = converted(spec, source, 3, 4)["embedding.word_embeddings.weight"]
    assert last.shape == (1, 6)
    assert not last.any()


def test_tied_output_is_the_embedding(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama", tied=True)
    held = converted(read_model_spec(directory / "config.json"), HFCheckpoint(directory), 1, 2)
    embedding = held["embedding.word_embeddings.weight"]
    torch.testing.assert_close(held["output_layer.weight"], embedding)


def test_parts_of_a_tensor_are_read(directory: Path) -> None:
    source, whole = HFCheckpoint(directory), load_file(directory / WHOLE)[Q_PROJ]
    runs = [slice(3, 5), slice(0, 2)]
    torch.testing.assert_close(source.read(Q_PROJ, runs), whole[[3, 4, 0, 1]])
    torch.testing.assert_close(source.read(Q_PROJ, slice(2, 4), slice(1, 7)), whole[2:4, 1:7])
    assert source.keys() == sorted(load_file(directory / WHOLE))


def test_random_weights_do_not_depend_on_the_slice() -> None:
    options = {"seed": 3, "device": torch.device("cpu"), "dtype": torch.float32}
    source = RandomWeights(hf_shapes(SMALL), **options)
    whole = source.read(Q_PROJ)
    torch.testing.assert_close(source.read(Q_PROJ, shard_range(8, 1, 2)), whole[4:])
    torch.testing.assert_close(source.read(Q_PROJ, cols=slice(2, 4)), whole[:, 2:4])
    again = RandomWeights(hf_shapes(SMALL), **options).read(Q_PROJ)
    torch.testing.assert_close(again, whole)
    others = RandomWeights(hf_shapes(SMALL), **(options | {"seed": 4}))
    assert not torch.equal(others.read(Q_PROJ), whole)
    assert not torch.equal(source.read("model.layers.0.self_attn.q_proj.weight"), whole)
    assert (source.read("model.norm.weight") == 1).all()
    large = RandomWeights({"w.weight": (400, 400)}, **options).read("w.weight")
    assert large.std().item() == pytest.approx(0.02, rel=0.02)


def test_pickles_and_folders_without_weights_are_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"must hold model.safetensors or .*, got no files"):
            HFCheckpoint(folder)
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=rf"must be safetensors, got {name} \(pickle\)"):
            HFCheckpoint(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("size", [0, 4, 100, -1, None])
def test_a_truncated_or_corrupt_file_is_refused(directory: Path, size: int | None) -> None:
    content = (directory / WHOLE).read_bytes()
    spoilt = b"\xff" * 8 + content[8:] if size is None else content[:size]
    (directory / WHOLE).write_bytes(spoilt)
    with pytest.raises(ValueError, match=r"model.safetensors must be a complete safetensors file"):
        HFCheckpoint(directory)


def test_an_index_naming_a_missing_file_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama", num_shards=3)
    missing = sorted(directory.glob("model-*"))[1]
    missing.unlink()
    with pytest.raises(ValueError, match=rf"must name files that exist, got {missing.name}$"):
        HFCheckpoint(directory)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', "\udcff"])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"index.json must be JSON with a weight_map"):
        HFCheckpoint(tmp_path)


def test_a_missing_or_quantised_tensor_is_refused(directory: Path, spec: ModelSpec) -> None:
    tensors = load_file(directory / WHOLE)
    codes = tensors.pop(O_PROJ).to(torch.float8_e4m3fn)
    save_file(tensors, directory / WHOLE)
    with pytest.raises(ValueError, match=rf"must hold the tensor {O_PROJ}, got 38 others"):
        converted(spec, HFCheckpoint(directory), 0, 1)
    save_file(tensors | {O_PROJ: codes}, directory / WHOLE)
    with pytest.raises(ValueError, match=rf"{O_PROJ} must be float32, .*got F8_E4M3"):
        converted(spec, HFCheckpoint(directory), 0, 1)


def test_a_wrong_shape_is_refused_with_both_shapes(directory: Path, spec: ModelSpec) -> None:
    wrong = replace(spec, ffn_size=192)
    name = "model.layers.0.mlp.gate_proj.weight"
    with pytest.raises(ValueError, match=rf"{name} must have shape \[192, 64\], got \[96, 64\]"):
        check_weights(wrong, HFCheckpoint(directory))


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        ({}, {"tp_size": 3}, r"num_heads must be a multiple of tp_size=3, got 4"),
        ({}, {"tp_size": 4}, r"num_kv_heads must be a multiple of tp_size=4, got 2"),
        ({"ffn_size": 5}, {"tp_size": 2}, r"ffn_size must be a multiple of tp_size=2, got 5"),
        ({}, {"pp_size": 3}, r"num_layers must be a multiple of pp_size=3, got 2"),
        ({}, {"pp_size": 2, "first_stage_layers": 2}, r"leave equally many of 2 .* got 2 and None"),
    ],
)
def test_unfit_layouts_refused(change: dict[str, int], sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(replace(SMALL, **change), ParallelLayout(**sizes))
    odd = replace(SMALL, hidden_size=7, vocab_size=11)
    check_layout(odd, ParallelLayout(tp_size=2, pp_size=2, cp_size=3))


def with_tensors(directory: Path, tensors: dict[str, Tensor], **fields: object) -> WeightSource:
    """The folder with further tensors, and other fields in config.json."""
    save_file(load_file(directory / WHOLE) | tensors, directory / WHOLE)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return HFCheckpoint(directory)


def test_a_head_of_its_own_is_not_tied_without_a_word(directory: Path) -> None:
    source = with_tensors(directory, {}, tie_word_embeddings=True)
    spec = read_model_spec(directory / "config.json")
    with pytest.raises(ValueError, match=r"lm_head.weight must equal model.embed_tokens.weight"):
        check_weights(spec, source)
    equal = source.read("model.embed_tokens.weight")
    check_weights(spec, with_tensors(directory, {HEAD: equal}))
    with pytest.raises(ValueError, match=r"lm_head.weight must equal"):
        check_weights(spec, with_tensors(directory, {HEAD: equal[:-1].clone()}))


def test_tensors_that_the_architecture_lacks_are_told(
    directory: Path, spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    known = {"model.rotary_emb.inv_freq": torch.ones(4), "model.layers.0.k_scale": torch.ones(1)}
    check_weights(spec, with_tensors(directory, known))
    assert not caplog.records
    check_weights(spec, with_tensors(directory, {Q_PROJ.replace("weight", "bias"): torch.ones(64)}))
    (record,) = caplog.records
    assert "hold 1 tensors that a llama of 4 layers does not have" in record.getMessage()
    assert "no effect: model.layers.1.self_attn.q_proj.bias" in record.getMessage()


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
