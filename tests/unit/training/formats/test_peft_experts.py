"""Adapters on routed experts as PEFT directories: what PEFT loads of ours, and what we read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.oracle_experts import expert_factor
from tests.helpers.tiny_models import make_tiny_model
from tests.unit.training.formats.test_peft_format import change_config
from tlora_megatron.cli.main import main
from tlora_megatron.config.job import DataSpec, JobSpec, LoraSpec
from tlora_megatron.layers.slab import factor_names, factor_shape
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.peft import export_adapter, load_adapter
from tlora_megatron.training.run.preparation import fit_to_job

OWN = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
FUSED = ("experts.linear_fc1", "experts.linear_fc2")
LORAS = {
    "experts alone": LoraSpec(rank=4, alpha=8, target_modules=OWN),
    "down alone": LoraSpec(rank=4, alpha=6, target_modules=OWN[2:]),
    "of another rank": LoraSpec(rank=4, alpha=8, expert_rank=3, use_rslora=True,
     target_modules=("q_proj", *OWN)),
    "one A for gate and up": LoraSpec(rank=4, alpha=8, expert_rank=2,
     target_modules=("o_proj", *FUSED)),
    "outer": LoraSpec(rank=4, alpha=6, expert_rank=3, expert_sharing="outer",
     target_modules=("q_proj", *OWN)),
    "outer, one A for gate and up": LoraSpec(rank=3, alpha=6, expert_sharing="outer",
     target_modules=FUSED),
}  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(path, request.param, vocab_size=64, num_hidden_layers=2)
    return path


@pytest.fixture
def model(base: Path) -> ModelSpec:
    return read_model_spec(base / "config.json")


def drawn(model: ModelSpec, lora: LoraSpec) -> dict[str, Tensor]:
    return {
        name: torch.randn(factor_shape(model, name, lora)) for name in factor_names(model, lora)
    }


def job_of(lora: LoraSpec) -> JobSpec:
    return JobSpec(name="a", data=DataSpec(train="a.jsonl"), lora=lora, max_steps=1)


def write(folder: Path, base: Path, model: ModelSpec, lora: LoraSpec) -> dict[str, Tensor]:
    factors = drawn(model, lora)
    export_adapter(folder, lora=lora, factors=factors, model=model, base_model=str(base))
    return factors


def merged(base: Path, folder: Path | None = None) -> dict[str, Tensor]:
    """The weights of the base, with the adapter of a folder in them."""
    found: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if folder is not None:
        found = PeftModel.from_pretrained(found, folder).merge_and_unload()
    return {name: weight.detach() for name, weight in found.named_parameters()}


def part_of(weights: dict[str, Tensor], name: str, ffn_size: int) -> Tensor:
    """A target's weight: routed experts lie in one tensor, gate above up."""
    layer, target = name.split(".", 2)[1:]
    is_down = target in ("experts.down_proj", "experts.linear_fc2")
    stored = target
    if target.startswith("experts"):
        stored = "experts.down_proj" if is_down else "experts.gate_up_proj"
    (found,) = (w for key, w in weights.items() if f".{layer}." in key and stored in key)
    rows = {"experts.gate_proj": slice(0, ffn_size), "experts.up_proj": slice(ffn_size, None)}
    return found[:, rows[target]] if target in rows else found


@pytest.mark.parametrize("kind", LORAS)
def test_peft_computes_the_same_and_we_read_it(
    kind: str, base: Path, model: ModelSpec, tmp_path: Path
) -> None:
    lora = LORAS[kind]
    factors = write(tmp_path / "a", base, model, lora)
    before, after = merged(base), merged(base, tmp_path / "a")
    for name in {name.rpartition(".")[0] for name in factors}:
        delta = part_of(after, name, model.ffn_size) - part_of(before, name, model.ffn_size)
        expected = lora.scaling * factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"]
        torch.testing.assert_close(delta, expected, rtol=1e-5, atol=1e-5, msg=name)
    adapter = load_adapter(tmp_path / "a", model=model)
    read = fit_to_job(adapter, job_of(lora))
    assert read.keys() == factors.keys()
    assert all(torch.equal(read[name], factors[name]) for name in factors)
    other = dataclasses.replace(lora, expert_rank=7)
    with pytest.raises(ValueError, match="init_from adapter's expert_rank must be the job's 7"):
        fit_to_job(adapter, job_of(other))


def test_experts_share_what_is_the_same(base: Path, model: ModelSpec, tmp_path: Path) -> None:
    """One file is both: every expert's own factors, and the shared ones where they are equal."""
    shared = LORAS["outer"]
    own = dataclasses.replace(shared, expert_sharing="none")
    factors = write(tmp_path / "shared", base, model, shared)
    read = fit_to_job(load_adapter(tmp_path / "shared", model=model), job_of(own))
    for name, factor in read.items():
        assert factor.shape == factor_shape(model, name, own)
        assert torch.equal(factor, factors[name].expand_as(factor)), name
    read["layers.1.experts.down_proj.lora_b"][2, 0, 0] += 1
    export_adapter(tmp_path / "own", lora=own, factors=read, model=model, base_model=str(base))
    with pytest.raises(
        ValueError,
        match=r"layers\.1\.experts\.down_proj\.lora_b must be the same "
        r"for all experts to be shared .*expert_sharing: outer.*, got another one for expert 2",
    ):
        fit_to_job(load_adapter(tmp_path / "own", model=model), job_of(shared))


@pytest.mark.parametrize("kind", ["outer", "outer, one A for gate and up"])
def test_servers_get_once_what_experts_share(
    kind: str, base: Path, model: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = LORAS[kind]
    factors = write(tmp_path / "a", base, model, lora)
    words = ["convert", str(base), str(tmp_path / "b"), "--adapter", str(tmp_path / "a")]
    assert main([*words, "--json", "--dry-run"]) == 0
    assert not (tmp_path / "b").exists()
    assert main([*words, "--json", "--dtype", "float32"]) == 0
    assert '"written": true' in capsys.readouterr().out
    held = load_file(tmp_path / "b" / "adapter_model.safetensors")
    block = "block_sparse_moe" if model.model_type == "mixtral" else "mlp"
    hidden, ffn, rank = model.hidden_size, model.ffn_size, lora.rank_of(lora.expert_targets[0])
    shapes = {
        "w1.lora_A": (1, rank, hidden), "w1.lora_B": (4, ffn, rank),
        "w3.lora_A": (1, rank, hidden), "w3.lora_B": (4, ffn, rank),
        "w2.lora_A": (4, rank, ffn), "w2.lora_B": (1, hidden, rank),
    }  # fmt: skip
    assert {key: tuple(t.shape) for key, t in held.items() if "experts" in key} == {
        f"base_model.model.model.layers.{layer}.{block}.experts.{name}.weight": shape
        for layer in range(2)
        for name, shape in shapes.items()
    }
    read = fit_to_job(load_adapter(tmp_path / "b", model=model), job_of(lora))
    assert read.keys() == factors.keys()
    assert all(torch.equal(read[name], factors[name]) for name in factors)


def test_what_is_not_shared_is_not_stacked(
    base: Path, model: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "own", base, model, LORAS["experts alone"])
    write(tmp_path / "dense", base, model, LoraSpec(rank=2, target_modules=("q_proj",)))
    for name, message in {
        "own": "must be the same for all experts to be shared (lora.expert_sharing: outer)",
        "dense": "must have factors on routed experts, got q_proj",
    }.items():
        words = ["convert", str(base), str(tmp_path / "b"), "--adapter", str(tmp_path / name)]
        assert main(words) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "b").exists()


def test_names_are_those_vllm_and_others_know(base: Path, model: ModelSpec, tmp_path: Path) -> None:
    write(tmp_path / "a", base, model, LORAS["experts alone"])
    held = load_file(tmp_path / "a" / "adapter_model.safetensors")
    of_mixtral = model.model_type == "mixtral"
    block = "block_sparse_moe" if of_mixtral else "mlp"
    names = ("w1", "w3", "w2") if of_mixtral else ("gate_proj", "up_proj", "down_proj")
    assert held.keys() == {
        f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{name}.lora_{side}.weight"
        for layer in range(2) for expert in range(4) for name in names for side in "AB"
    }  # fmt: skip
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(names)


def test_what_peft_saves_itself_we_read(base: Path, model: ModelSpec, tmp_path: Path) -> None:
    found: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=parameters,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    found = get_peft_model(found, config)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    found.save_pretrained(tmp_path / "a")
    lora = LoraSpec(rank=3, alpha=6, target_modules=("q_proj", *FUSED))
    read = fit_to_job(load_adapter(tmp_path / "a", model=model), job_of(lora))
    for name in factor_names(model, lora):
        if ".experts." in name:
            assert torch.equal(read[name], expert_factor(found, name)), name


def test_an_expert_s_tensor_beside_one_of_all(base: Path, model: ModelSpec, tmp_path: Path) -> None:
    write(tmp_path / "a", base, model, LORAS["outer"])
    weights = tmp_path / "a" / "adapter_model.safetensors"
    held = load_file(weights)
    key = "base_model.model.model.layers.0.mlp.experts.w2.lora_B.weight"
    save_file({**held, key: torch.zeros(1, model.hidden_size, 3)}, weights)
    with pytest.raises(ValueError, match="must be one tensor an expert or one of all, got both"):
        load_adapter(tmp_path / "a", model=model)


def test_refused(base: Path, model: ModelSpec, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write(folder, base, model, LORAS["of another rank"])
    weights = folder / "adapter_model.safetensors"
    held = load_file(weights)
    last = sorted(key for key in held if "experts.3" in key and "lora_A" in key)[0]
    save_file({key: value for key, value in held.items() if key != last}, weights)
    with pytest.raises(ValueError, match="must be there of every expert, got none of 3"):
        load_adapter(folder, model=model)
    save_file(held, weights)
    change_config(folder, rank_pattern={"q_proj": 4, "gate_proj": 2})
    with pytest.raises(ValueError, match="rank_pattern and alpha_pattern must be unset, or give"):
        load_adapter(folder, model=model)
    change_config(folder, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 4})
    with pytest.raises(ValueError, match="one other rank and the same alpha / rank"):
        load_adapter(folder, model=model)
