"""PEFT directories: what PEFT reads of ours, what we read of PEFT's, and everything refused."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.tiny_models import make_tiny_model, random_factors
from tlora_megatron.config.job import HF_TARGETS, MEGATRON_TARGETS, DataSpec, JobSpec, LoraSpec
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.peft import export_adapter, load_adapter
from tlora_megatron.training.run.preparation import fit_to_job

LORA = LoraSpec(rank=4, alpha=8.0, target_modules=("q_proj", "down_proj"))
Q_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(base_dir: Path) -> ModelSpec:
    return read_model_spec(base_dir / "config.json")


@pytest.fixture
def adapter_dir(tmp_path: Path, model: ModelSpec) -> Path:
    """A good adapter of `LORA`, to be spoilt."""
    directory = tmp_path / "adapter"
    export(directory, LORA, random_factors(model, LORA), model)
    return directory


def export(
    directory: Path, lora: LoraSpec, factors: Mapping[str, Tensor], model: ModelSpec, **kw: Any
) -> None:
    export_adapter(directory, lora=lora, factors=factors, model=model, base_model="tiny", **kw)


def merged_logits(
    base_dir: Path, lora: LoraSpec, factors: Mapping[str, Tensor], tokens: Tensor
) -> Tensor:
    """fp64 logits with `W + scaling * B A` written into the base, fused rows cut by hand."""
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float64)
    places = {
        "linear_qkv": {"self_attn.q_proj": (0, 64), "self_attn.k_proj": (64, 96)}
        | {"self_attn.v_proj": (96, 128)},
        "linear_proj": {"self_attn.o_proj": (0, 64)},
        "linear_fc1": {"mlp.gate_proj": (0, 96), "mlp.up_proj": (96, 192)},
        "linear_fc2": {"mlp.down_proj": (0, 64)},
    }
    scaling = lora.alpha / (lora.rank**0.5 if lora.use_rslora else lora.rank)
    with torch.no_grad():
        for name in factors:
            _, layer, target, side = name.split(".")
            if side == "lora_b":
                continue
            delta = scaling * factors[name[:-1] + "b"].double() @ factors[name].double()
            block = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            whole = {f"{block}.{target}": (0, len(delta))}
            for module, (begin, end) in places.get(target, whole).items():
                linear = base.get_submodule(f"model.layers.{layer}.{module}")
                linear.weight += delta[begin:end]
        return base(tokens).logits


def peft_logits(base_dir: Path, directory: Path, tokens: Tensor) -> Tensor:
    """fp64 logits of the base under the adapter as PEFT loads it; a warning of PEFT is an error."""
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = PeftModel.from_pretrained(base, str(directory))
    with torch.no_grad():
        return loaded.double()(tokens).logits


@pytest.mark.parametrize(
    "lora",
    [
        LoraSpec(rank=6, alpha=9.5, target_modules=HF_TARGETS),
        LoraSpec(rank=3, alpha=8.0, target_modules=("q_proj", "up_proj"), use_rslora=True),
        LoraSpec(rank=5, alpha=7.0, target_modules=MEGATRON_TARGETS),
        LoraSpec(rank=2, alpha=4.0, target_modules=("linear_fc1", "v_proj")),
    ],
    ids=["all", "rslora", "fused", "mixed"],
)
def test_peft_computes_what_we_trained(
    base_dir: Path, model: ModelSpec, tmp_path: Path, lora: LoraSpec
) -> None:
    factors = random_factors(model, lora, seed=1)
    export(tmp_path / "adapter", lora, factors, model)
    tokens = torch.arange(3, 27).reshape(2, 12)
    ours = merged_logits(base_dir, lora, factors, tokens)
    torch.testing.assert_close(
        peft_logits(base_dir, tmp_path / "adapter", tokens), ours, rtol=1e-6, atol=1e-6
    )
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float64)
    assert (base(tokens).logits - ours).abs().max() > 0.1


def test_config_is_what_peft_and_vllm_read(tmp_path: Path, model: ModelSpec) -> None:
    lora = LoraSpec(rank=4, alpha=8.0, dropout=0.05, target_modules=("v_proj", "linear_fc1"))
    export(tmp_path / "adapter", lora, random_factors(model, lora), model)
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert set(raw) <= {field.name for field in dataclasses.fields(LoraConfig)}
    assert raw["target_modules"] == ["gate_proj", "up_proj", "v_proj"]
    assert (raw["r"], raw["lora_alpha"], raw["lora_dropout"]) == (4, 8, 0.05)
    assert type(raw["lora_alpha"]) is int
    assert (raw["peft_type"], raw["task_type"], raw["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert raw["inference_mode"] is True
    assert raw["base_model_name_or_path"] == "tiny"
    config = LoraConfig.from_pretrained(tmp_path / "adapter")
    assert config.r == 4
    assert config.target_modules == {"v_proj", "gate_proj", "up_proj"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path: Path, model: ModelSpec, dtype: torch.dtype) -> None:
    lora = LoraSpec(
        rank=6, alpha=9.5, dropout=0.1, use_rslora=True, target_modules=("up_proj", "q_proj")
    )
    factors = random_factors(model, lora)
    export(tmp_path / "adapter", lora, factors, model, dtype=dtype)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    read = load_adapter(tmp_path / "adapter", model=model)
    assert read.lora == dataclasses.replace(lora, target_modules=("q_proj", "up_proj"))
    assert read.base_model == "tiny"
    assert read.factors.keys() == factors.keys()
    for name, factor in read.factors.items():
        assert factor.dtype == torch.float32
        assert torch.equal(factor, factors[name].to(dtype).float()), name


@pytest.mark.parametrize("targets", [["k_proj", "gate_proj"], "all-linear", r".*\.(k|gate)_proj"])
def test_reads_what_peft_saves(
    base_dir: Path, model: ModelSpec, tmp_path: Path, targets: list[str] | str
) -> None:
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    config = LoraConfig(
        r=4, lora_alpha=12, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    trained = get_peft_model(base, config)
    trained.save_pretrained(tmp_path)
    read = load_adapter(tmp_path, model=model)
    expected = HF_TARGETS if targets == "all-linear" else ("k_proj", "gate_proj")
    assert read.lora == LoraSpec(rank=4, alpha=12.0, target_modules=expected)
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        theirs = trained.double().eval()(tokens).logits
    ours = merged_logits(base_dir, read.lora, read.factors, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


WITH_PATHS = [*(f"model.layers.{n}.self_attn.q_proj" for n in range(2)), "mlp.down_proj"]


@pytest.mark.parametrize("targets", [WITH_PATHS, "all-linear", "(q|down)_proj", None], ids=str)
def test_targets_from_tensors(adapter_dir: Path, model: ModelSpec, targets: Any) -> None:
    change_config(adapter_dir, target_modules=targets)
    assert load_adapter(adapter_dir, model=model).lora == LORA


def test_older_keys_are_read(adapter_dir: Path, model: ModelSpec) -> None:
    before = load_adapter(adapter_dir, model=model).factors
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    older = {key.replace(".weight", ".default.weight"): value for key, value in tensors.items()}
    save_file(older, adapter_dir / "adapter_model.safetensors")
    after = load_adapter(adapter_dir, model=model).factors
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def change_config(directory: Path, **fields: object) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(directory: Path, **changes: Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors."""
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path) | changes
    save_file({key: value for key, value in tensors.items() if value is not None}, path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "IA3"}, r"peft_type must be 'LORA', got 'IA3'"),
        ({"bias": "all"}, r"bias must be 'none', got 'all'"),
        ({"use_dora": True}, r"use_dora must be unset \(plain LoRA only\), got True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save must be unset .* got \['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern must be unset .* got \{'q_proj': 8\}"),
        ({"alpha_pattern": {"q_proj": 8}}, r"alpha_pattern must be unset .* got \{'q_proj': 8\}"),
        ({"layers_to_transform": [0]}, r"layers_to_transform must be unset .* got \[0\]"),
        ({"layers_to_transform": 0}, r"layers_to_transform must be unset .* got 0"),
        ({"of_a_later_peft": {"on": 1}}, r"of_a_later_peft must be unset"),
        ({"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights must be .* 'pissa_niter_4'"),
        ({"r": 0}, r"r must be a whole number of at least 1, got 0"),
        ({"r": 4.0}, r"r must be a whole number of at least 1, got 4\.0"),
        ({"r": True}, r"r must be a whole number of at least 1, got True"),
        ({"r": 8}, r"layers\.0\.\w+\.lora_\w must have shape \[.*8.*\], got \[.*4.*\]"),
        ({"lora_alpha": "16"}, r"lora_alpha must be a number, got '16'"),
        ({"lora_alpha": 0}, r"lora_alpha must be above 0 and finite, got 0"),
        ({"lora_alpha": float("nan")}, r"lora_alpha must be above 0 and finite, got nan"),
        ({"lora_dropout": 1.0}, r"lora_dropout must be at least 0 and below 1, got 1\.0"),
        ({"lora_dropout": [0]}, r"lora_dropout must be a number, got \[0\]"),
        ({"use_rslora": "yes"}, r"use_rslora must be true or false, got 'yes'"),
        ({"base_model_name_or_path": 3}, r"base_model_name_or_path must be a string or null"),
        ({"target_modules": {"q_proj": 1}}, r"target_modules must be a list of names"),
        ({"target_modules": ["q_proj", 3]}, r"target_modules must be a list of names"),
        ({"target_modules": ["q_proj", "c_attn"]},
         r"target_modules must be among q_proj, .*down_proj, got 'c_attn'"),
        ({"target_modules": ["q_proj", "k_proj", "down_proj"]},
         r"must be the modules that have tensors, down_proj, q_proj, got down_proj, k_proj"),
        ({Q_KEY: None}, r"cover q_proj, down_proj in all 2 layers, got none for layers\.0\.q_proj"),
        ({Q_KEY: torch.zeros(4, 32)}, r"layers\.0\.q_proj\.lora_a .* \[4, 64\], got \[4, 32\]"),
        ({Q_KEY: torch.zeros(256)}, r"layers\.0\.q_proj\.lora_a .* \[4, 64\], got \[256\]"),
        ({Q_KEY: torch.full((4, 64), float("inf"))}, r"layers\.0\.q_proj\.lora_a must be finite"),
        ({Q_KEY: torch.full((4, 64), float("nan"))}, r"layers\.0\.q_proj\.lora_a must be finite"),
        ({Q_KEY: torch.ones(4, 64).char()}, r"q_proj\.lora_A\.weight must be floating point"),
        ({Q_KEY.replace("layers.0", "layers.2"): torch.zeros(4, 64)},
         r"of q_proj, down_proj in layers 0 to 1, got layers\.2\.q_proj\.lora_a"),
        ({Q_KEY.replace(".weight", ".default.weight"): torch.zeros(4, 64)},
         r"layers\.0\.q_proj\.lora_a must be stored once, got a second one under"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, r"got '.*lm_head"),
        ({Q_KEY.replace("self_attn", "mlp"): torch.zeros(4, 64)}, r"got '.*mlp\.q_proj"),
        ({Q_KEY.replace("q_proj", "qkv"): torch.zeros(4, 64)}, r"layer's q_proj, .*, got '.*qkv"),
        ({Q_KEY.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(64)},
         r"tensors must be lora_A or lora_B .* got '.*lora_magnitude_vector'"),
    ],
)  # fmt: skip
def test_refused(adapter_dir: Path, model: ModelSpec, changes: dict[str, Any], match: str) -> None:
    are_tensors = all(key.startswith("base_model.model.") for key in changes)
    change = change_tensors if are_tensors else change_config
    change(adapter_dir, **changes)
    with pytest.raises(ValueError, match=match) as caught:
        load_adapter(adapter_dir, model=model)
    assert str(caught.value).startswith(f"adapter {adapter_dir}: ")


def test_refused_files(adapter_dir: Path, model: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold adapter_config\.json, got none"):
        load_adapter(tmp_path / "missing", model=model)
    weights = adapter_dir / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 100, 4, 0):
        weights.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="must be a whole safetensors file, got"):
            load_adapter(adapter_dir, model=model)
    save_file({}, weights)
    with pytest.raises(ValueError, match="must hold LoRA tensors, got none"):
        load_adapter(adapter_dir, model=model)
    weights.unlink()
    with pytest.raises(ValueError, match=r"must hold adapter_model\.safetensors, got none"):
        load_adapter(adapter_dir, model=model)
    (adapter_dir / "adapter_model.bin").write_bytes(b"never unpickled")
    with pytest.raises(ValueError, match=r"must be safetensors, got adapter_model\.bin \(pickle\)"):
        load_adapter(adapter_dir, model=model)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"{", r"adapter_config\.json must be JSON"),
        (b"\xff\xfe", r"adapter_config\.json must be JSON"),
        (b"[]", r"adapter_config\.json must be a JSON object, got list"),
        (b"{}", r"peft_type must be 'LORA', got None"),
    ],
)
def test_refused_configs(adapter_dir: Path, model: ModelSpec, content: bytes, match: str) -> None:
    (adapter_dir / "adapter_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=match):
        load_adapter(adapter_dir, model=model)


def test_export_refuses_what_does_not_fit(tmp_path: Path, model: ModelSpec) -> None:
    good = random_factors(model, LORA)
    name = "layers.1.q_proj.lora_b"
    cases = [
        ({**good, name: torch.zeros(64, 5)}, r"q_proj\.lora_b must have shape \[64, 4\], got"),
        ({**good, name: good[name] / 0}, r"q_proj\.lora_B\.weight must be finite"),
        ({**good, "layers.2.q_proj.lora_a": good[name]}, r"0 to 1, got layers\.2\.q_proj"),
        ({key: good[key] for key in good if key != name}, r"got none for layers\.1\.q_proj"),
    ]
    for factors, match in cases:
        with pytest.raises(ValueError, match=match):
            export(tmp_path / "adapter", LORA, factors, model)
    twice = LoraSpec(target_modules=("linear_qkv", "q_proj"))
    with pytest.raises(ValueError, match="adapt each module once, got q_proj twice in linear_qkv"):
        export(tmp_path / "adapter", twice, {}, model)
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_a_folder_of_other_files(tmp_path: Path, model: ModelSpec) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for directory in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(ValueError, match="must be empty or hold an adapter, got"):
            export(directory, LORA, random_factors(model, LORA), model)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_export_follows_no_link(adapter_dir: Path, model: ModelSpec, tmp_path: Path) -> None:
    link, factors = tmp_path / "link", random_factors(model, LORA)
    link.symlink_to(adapter_dir)
    before = {path.name: path.read_bytes() for path in adapter_dir.iterdir()}
    export(link, LORA, factors, model)  # the same again: nothing to be written
    with pytest.raises(ValueError, match=r"adapter directory must be no symbolic link, got"):
        export(link, LORA, {name: factor + 1 for name, factor in factors.items()}, model)
    assert {path.name: path.read_bytes() for path in adapter_dir.iterdir()} == before


def job(lora: LoraSpec) -> JobSpec:
    return JobSpec(name="gsm8k", data=DataSpec(train="unused.jsonl"), lora=lora)


def test_fits_the_job_it_was_trained_for(adapter_dir: Path, model: ModelSpec) -> None:
    adapter = load_adapter(adapter_dir, model=model)
    other_dropout = dataclasses.replace(LORA, dropout=0.3, target_modules=("down_proj", "q_proj"))
    factors = fit_to_job(adapter, job(other_dropout))
    assert factors.keys() == adapter.factors.keys()
    assert all(torch.equal(factors[name], adapter.factors[name]) for name in factors)


@pytest.mark.parametrize("targets", [MEGATRON_TARGETS, ("linear_qkv", "gate_proj")])
def test_fused_ones_come_back(tmp_path: Path, model: ModelSpec, targets: tuple[str, ...]) -> None:
    lora = LoraSpec(rank=3, alpha=5.0, target_modules=targets)
    factors = random_factors(model, lora, seed=2)
    export(tmp_path / "adapter", lora, factors, model)
    back = fit_to_job(load_adapter(tmp_path / "adapter", model=model), job(lora))
    assert back.keys() == factors.keys()
    assert all(torch.equal(back[name], factors[name]) for name in factors)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rank": 8, "alpha": 16.0},
         r"job 'gsm8k': init_from .* rank must be the job's 8, got 4; .* set lora.rank: 4,"),
        ({"alpha": 16.0},
         r"scaling must be the job's 4 \(alpha 16 / rank 4\), got 2 .* set lora.alpha: 8$"),
        ({"use_rslora": True}, r"job's 4 \(alpha 8 / sqrt\(rank\) 4\), got 2"),
        ({"target_modules": ("q_proj", "v_proj")},
         r"target_modules must be the job's q_proj, v_proj, got q_proj, down_proj"),
        ({"target_modules": ("linear_qkv",)},
         r"must be the job's q_proj, k_proj, v_proj, got q_proj, down_proj"),
    ],
)  # fmt: skip
def test_refuses_another_job(
    adapter_dir: Path, model: ModelSpec, changes: dict[str, Any], match: str
) -> None:
    adapter = load_adapter(adapter_dir, model=model)
    with pytest.raises(ValueError, match=match):
        fit_to_job(adapter, job(dataclasses.replace(LORA, **changes)))


def test_refuses_to_fuse_factors_of_their_own(tmp_path: Path, model: ModelSpec) -> None:
    lora = LoraSpec(rank=4, target_modules=("q_proj", "k_proj", "v_proj"))
    export(tmp_path / "adapter", lora, random_factors(model, lora), model)
    adapter = load_adapter(tmp_path / "adapter", model=model)
    fused = dataclasses.replace(lora, target_modules=("linear_qkv",))
    with pytest.raises(
        ValueError,
        match=r"q_proj, k_proj, v_proj must share one A to become linear_qkv, got .*"
        r"k_proj in layer 0; use target_modules: \[q_proj, k_proj, v_proj\]",
    ):
        fit_to_job(adapter, job(fused))
