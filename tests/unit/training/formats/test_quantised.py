"""Published FP8 folders: every value is kept; a base's quantisation in checkpoints and adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from peft import PeftConfig
from peft.utils import load_peft_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.base_case import converted, parts_of
from tests.helpers.fp8_folders import (
    FILE,
    FORMATS,
    Format,
    decoded,
    make_fp8_folder,
    set_quantization,
    statement,
)
from tests.helpers.one_process import one_process_groups
from tests.helpers.tiny_models import make_tiny_model
from tests.unit.ops.quantised.test_quant_kernels import values_of
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.integrations.megatron import model as backbone
from tlora_megatron.layers.quantised_linear import quantised_linears
from tlora_megatron.layers.slab import factor_names, initial_factor
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import base_quantisation, check_block_layout
from tlora_megatron.ops.quantised.weight import QuantWeight
from tlora_megatron.training.formats import base_reader
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint
from tlora_megatron.training.formats.peft import export_adapter, load_adapter
from tlora_megatron.training.formats.quantised import (
    QuantisationCard,
    QuantizedSource,
    _widened,
    check_same_base,
    quantisation_card,
)

CODES = torch.zeros(192, 512).to(torch.float8_e4m3fn)
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
WIDE_DOWN = "decoder.layers.1.mlp.linear_fc2.weight"


def held(directory: Path, tp_rank: int, tp_size: int) -> dict[str, Tensor]:
    """Returns what a rank holds of every tensor, codes multiplied with their scales."""
    spec = read_model_spec(directory / "config.json")
    quantisation = base_quantisation(BaseModelSpec(path=str(directory)), spec)
    assert quantisation is not None
    assert quantisation.published is not None
    check_block_layout(spec, quantisation, ParallelLayout(tp_size=tp_size))
    source = QuantizedSource(directory, quantisation.published)
    source.check(spec, quantisation)
    tensors = parts_of(spec, tp_rank, tp_size)
    codes = {
        f"decoder.layers.{layer}.{'mlp' if 'fc' in linear else 'self_attention'}.{linear}.weight"
        for layer, linear in quantisation.linears
    }
    parameters, scales = {}, {}
    for tensor in tensors:
        dtype = torch.uint8 if tensor.name in codes else torch.float32
        parameters[tensor.name] = torch.zeros(tensor.shape, dtype=dtype)
        if tensor.name in codes:
            rows, columns = tensor.shape
            grid = (-(-rows // 128), -(-columns // 128))
            shape = grid if quantisation.kind == "block" else (rows,)
            scales[tensor.name] = torch.full(shape, float("nan"))
    rounding = base_reader.read_base(source, tensors, parameters, scales)
    assert not rounding.relative()  # nothing is quantised again
    for tensor in tensors:
        if tensor.name in scales:
            source.put_scales(tensor, scales[tensor.name])
    return parameters | {
        name: values_of(QuantWeight(parameters[name], scales[name]), torch.float32)
        for name in scales
    }


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_value_is_kept(
    tmp_path: Path, kind: Format, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_reader, "_BLOCK_BYTES", 20_000)
    directory = make_fp8_folder(tmp_path, kind)
    spec = read_model_spec(directory / "config.json")
    (tmp_path / "wide").mkdir()
    save_file(decoded(directory), tmp_path / "wide" / FILE)
    for rank in range(tp_size):
        found = held(directory, rank, tp_size)
        expected = converted(spec, HFCheckpoint(tmp_path / "wide"), rank, tp_size)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", ["tensor", "fp8"])
def test_a_model_is_built_of_a_published_folder(tmp_path: Path, kind: Format) -> None:
    directory = make_fp8_folder(tmp_path, kind)
    spec, layout = read_model_spec(directory / "config.json"), ParallelLayout()
    quantisation = base_quantisation(BaseModelSpec(path=str(directory)), spec)
    with one_process_groups():
        model = backbone.build_backbone(
            spec, layout, dtype=torch.bfloat16, quantisation=quantisation
        )
        backbone.load_backbone(model, spec, directory, layout, quantisation=quantisation)
    weights = dict(quantised_linears(model))
    assert len(weights) == 7  # of eight
    assert {weight.kind for weight in weights.values()} == {"block" if kind == "fp8" else "channel"}
    held_bytes = sum(w.codes_NK.nbytes + w.scales.nbytes for w in weights.values())
    assert quantisation is not None
    assert quantisation.num_bytes(spec) == held_bytes
    expected = held(directory, 0, 1)
    for name, weight in weights.items():
        assert torch.equal(values_of(weight, torch.float32), expected[f"{name}.weight"]), name
    state = model.state_dict()
    assert torch.equal(state[WIDE_DOWN], expected[WIDE_DOWN].bfloat16())


Change = Callable[[dict[str, Tensor]], None]


def drop(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, value: Tensor) -> Change:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("channel", drop(f"{Q}.weight_scale"),
         f"{Q}.weight must have its scales in {Q}.weight_scale, got none"),
        ("fp8", put(f"{Q}.weight", torch.zeros(512, 192)),
         f"{Q}.weight must be F8_E4M3, as config.json says with its targets and the modules "
         f"that it leaves out, got F32"),
        ("channel",
         put("model.layers.1.mlp.down_proj.weight", torch.zeros(192, 512).to(torch.float8_e4m3fn)),
         "model.layers.1.mlp.down_proj.weight must be float32, bfloat16 or float16, as config."),
        ("fp8", put(f"{Q}.weight", torch.zeros(512, 192).to(torch.float8_e5m2)),
         f"{Q}.weight must be F8_E4M3, as config.json says"),
        ("fp8", put(f"{Q}.weight_scale_inv", torch.ones(4, 1)),
         f"{Q}.weight_scale_inv must have shape [4, 2] over [512, 192] codes, got [4, 1]"),
        ("channel", put(f"{Q}.weight_scale", torch.ones(512, 1, dtype=torch.int32)),
         f"{Q}.weight_scale must be F32, BF16, F16 or F8_E8M0, got I32"),
        ("channel", put("model.norm.weight_scale", torch.ones(1)),
         "model.norm.weight must be F8_E4M3, as model.norm.weight_scale belongs to it, got F32"),
        ("channel", put("model.layers.7.q.weight_scale", torch.ones(1)),
         "model.layers.7.q.weight must be F8_E4M3, as model.layers.7.q.weight_scale belongs to "
         "it, got no such tensor"),
        ("channel", put(f"{Q}.input_scale", torch.ones(1)),
         f"tensors beside codes must be *.weight_scale, got {Q}.input_scale"),
        ("fp8", put(f"{Q}.weight_scale_inv", torch.full((4, 2), float("nan"))),
         f"{Q}.weight_scale_inv must be finite and not negative"),
        ("channel",
         put(f"{DOWN}.weight",
          torch.full((192, 512), 255, dtype=torch.uint8).view(torch.float8_e4m3fn)),
         f"{DOWN}.weight of "),
    ],
)  # fmt: skip
def test_tensors_not_as_stated(tmp_path: Path, kind: Format, change: Change, message: str) -> None:
    directory = make_fp8_folder(tmp_path, kind)
    tensors = dict(load_file(directory / FILE))
    change(tensors)
    save_file(tensors, directory / FILE)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        held(directory, 0, 1)


def test_exponents_are_widened_to_the_bit() -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found = _widened(stored, "F8_E8M0")
    expected = torch.tensor([2.0 ** (code - 127) for code in range(255)])
    assert torch.equal(found[:255], expected)
    assert not found[255].isfinite()


def test_layouts_that_cut_blocks_are_refused(tmp_path: Path) -> None:
    directory = make_fp8_folder(tmp_path, "fp8", intermediate_size=384)
    match = r"intermediate_size / tp_size must be a multiple of 128 with scales of blocks, got 192 "
    with pytest.raises(ValueError, match=match + r"with parallel.tp_size 2; .*tp_size may be 1$"):
        held(directory, 0, 2)
    assert held(directory, 0, 1)
    directory = make_fp8_folder(tmp_path / "64", "fp8", head_dim=64)
    match = r"head_dim must be a multiple of 128 with scales of blocks, got 64 .* no tp_size fits"
    with pytest.raises(ValueError, match=match):
        held(directory, 0, 1)
    make_fp8_folder(tmp_path / "channels", "channel", head_dim=64)
    assert held(tmp_path / "channels", 0, 2)


def test_a_folder_says_itself_what_stays(tmp_path: Path) -> None:
    directory = make_fp8_folder(tmp_path, "channel")
    spec = read_model_spec(directory / "config.json")
    base = BaseModelSpec(path=str(directory), unquantised=("embed_tokens", "lm_head", "layers.0"))
    match = r"base_model.unquantised must be left out over a folder that is published in FP8"
    with pytest.raises(ValueError, match=match):
        base_quantisation(base, spec)
    stated = statement("channel")
    stated["ignore"] += [Q]
    set_quantization(directory, stated)
    match = r"must treat q_proj, k_proj, v_proj of layer 0 alike, which are one GEMM here"
    with pytest.raises(ValueError, match=match):
        held(directory, 0, 1)


CARD = QuantisationCard(method="fp8", format="e4m3, one scale an output channel", digest="a1" * 32)
OTHER = replace(CARD, digest="b2" * 32)
LORA = LoraSpec(rank=2, target_modules=("q_proj",))
WHERE = Path("out/step_00000004")


def quantization_of(base: BaseModelSpec) -> QuantisationCard | None:
    spec = read_model_spec(Path(str(base.path)) / "config.json")
    return quantisation_card(base, spec, base_quantisation(base, spec))


def test_the_digest_is_that_of_the_codes(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "a", "llama", num_hidden_layers=2)
    base = BaseModelSpec(path=str(directory), quantization="fp8")
    first = quantization_of(base)
    assert first is not None
    assert quantization_of(base) == first
    assert (
        quantization_of(replace(base, dtype="float32")) == first
    )  # codes are made of what is stored
    assert quantization_of(replace(base, quantization=None)) is None
    listed = replace(base, unquantised=("embed_tokens", "lm_head", "layers.1.down_proj"))
    assert quantization_of(listed) != first
    tensors = dict(load_file(directory / FILE))
    tensors["model.layers.1.self_attn.v_proj.weight"][3] *= 1.5  # another scale, the same codes
    save_file(tensors, directory / FILE)
    assert quantization_of(base) != first


def test_a_published_folder_has_the_digest_of_its_own_codes(tmp_path: Path) -> None:
    directory = make_fp8_folder(tmp_path, "fp8")
    base = BaseModelSpec(path=str(directory))
    first = quantization_of(base)
    assert first is not None
    assert first.format == "e4m3, one scale a block of 128 x 128 (fp8)"
    tensors = dict(load_file(directory / FILE))
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][0, 0] *= 2
    save_file(tensors, directory / FILE)
    assert quantization_of(base) != first


@pytest.mark.parametrize(
    ("saved", "ours", "message"),
    [
        (None, CARD,
         "job 'a': the base's quantization must be null (bf16 or fp32 weights) as in its "
         f"checkpoint {WHERE}, got fp8 (e4m3, one scale an output channel, a1a1a1a1a1a1); "
         "base_model.allow_change: true lets jobs go on over it"),
        (CARD, None, "must be fp8 (e4m3, one scale an output channel, a1a1a1a1a1a1) as in"),
        (CARD, OTHER, "got fp8 (e4m3, one scale an output channel, b2b2b2b2b2b2); base_model"),
    ],
)  # fmt: skip
def test_a_job_goes_on_over_the_same_codes_or_where_it_may(
    saved: QuantisationCard | None,
    ours: QuantisationCard | None,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = json.loads(json.dumps({"quantisation": None if saved is None else asdict(saved)}))
    with pytest.raises(ValueError, match=r"^job 'a': the base's quantization must be") as refused:
        check_same_base("a", WHERE, state, ours, allow_change=False)
    assert message in str(refused.value)
    check_same_base("a", WHERE, state, ours, allow_change=True)
    assert "job a goes on over a base with quantization" in caplog.text
    caplog.clear()
    check_same_base("a", WHERE, state, saved, allow_change=False)
    check_same_base("a", WHERE, {}, None, allow_change=False)  # of an earlier version
    assert not caplog.text


def test_an_adapter_names_its_base_and_peft_reads_it(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", "llama", num_hidden_layers=2)
    spec, directory = read_model_spec(base / "config.json"), tmp_path / "adapter"
    factors = {n: initial_factor(spec, n, LORA, 0) for n in factor_names(spec, LORA)}

    def export(quantisation: QuantisationCard | None) -> None:
        export_adapter(
            directory, lora=LORA, factors=factors, model=spec, base_model="tiny",
            quantisation=quantisation,
        )  # fmt: skip

    export(None)
    assert not (directory / "README.md").exists()
    assert load_adapter(directory, model=spec).quantisation is None
    export(CARD)
    assert load_adapter(directory, model=spec).quantisation == CARD
    text = (directory / "README.md").read_text()
    assert 'base_model: "tiny"' in text
    assert CARD.format in text
    assert CARD.digest in text
    assert PeftConfig.from_pretrained(str(directory)).base_model_name_or_path == "tiny"
    weights = load_peft_weights(str(directory), device="cpu")
    assert len(weights) == 2 * spec.num_layers
    assert all(torch.isfinite(value).all() for value in weights.values())
    export(None)
    assert not (directory / "README.md").exists()
    (directory / "README.md").write_text("somebody's")
    export(OTHER)
    assert (directory / "README.md").read_text() == "somebody's"
    assert load_adapter(directory, model=spec).quantisation == OTHER
    export(None)
    assert (directory / "README.md").read_text() == "somebody's"
