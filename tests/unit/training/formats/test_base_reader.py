"""The threaded reader fills parameters with a base's values, or quantised ones, and names
damage.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.base_case import FILE, UP, assert_base_is_read, converted, parts_of
from tests.helpers.one_process import one_process_groups
from tests.helpers.tiny_models import TINY_MODEL_TYPES, TinyModelType, make_tiny_model
from tlora_megatron.integrations.megatron import model as backbone
from tlora_megatron.layers.quantised_linear import quantised_linears
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import quantised_on_reading
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.quantised.weight import encode_weight
from tlora_megatron.runtime.backbone import EXPECTED, log_base, outliers
from tlora_megatron.training.formats import base_reader
from tlora_megatron.training.formats.base_reader import read_base
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, RandomWeights, WeightSource
from tlora_megatron.training.formats.hf_convert import (
    Rounding,
    draw_base,
    hf_shapes,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("model_type", TINY_MODEL_TYPES)
def test_parameters_are_those_of_tensors_read_one_by_one(
    tmp_path: Path, model_type: TinyModelType, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of a few rows: units of qkv, rows and what is left over are all cut.
    monkeypatch.setattr(base_reader, "_BLOCK_BYTES", 1800)
    directory = make_tiny_model(tmp_path, model_type, vocab_size=127, num_shards=2)
    assert_base_is_read(directory, CPU, tp_size=tp_size)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_any_dtype(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    file = make_tiny_model(tmp_path, "llama", tied=True) / FILE
    save_file({name: value.to(stored) for name, value in load_file(file).items()}, file)
    assert_base_is_read(tmp_path, CPU, dtype=dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path: Path, value: float) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    tensors = load_file(directory / FILE)
    tensors[UP][3, 5] = value
    save_file(tensors, directory / FILE)
    match = rf"^{UP} of .*{FILE} must be finite, got NaN or infinity: .* fetch or convert it anew"
    with pytest.raises(ValueError, match=match):
        assert_base_is_read(directory, CPU)
    with pytest.raises(ValueError, match=match):
        HFCheckpoint(directory).read(UP)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    spec, checkpoint = read_model_spec(directory / "config.json"), HFCheckpoint(directory)
    tensors = parts_of(spec, 0, 1)
    parameters = {tensor.name: torch.empty(tensor.shape) for tensor in tensors}
    (directory / FILE).write_bytes((directory / FILE).read_bytes()[:5000])
    with pytest.raises(ValueError, match=rf"{FILE} must be a complete safetensors file, got its"):
        base_reader.read_base(checkpoint, tensors, parameters)


UNQUANTISED = ("embed_tokens", "lm_head", "layers.1.o_proj")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", vocab_size=127)


def read(source: WeightSource, spec: ModelSpec, tp_rank: int, tp_size: int) -> dict[str, Tensor]:
    """One rank's tensors, with codes where there are linears, and scales as `NAME.scale`."""
    tensors = parts_of(spec, tp_rank, tp_size)
    held = [t for t in tensors if ".linear_" in t.name and t.name.endswith(".weight")]
    scales = {tensor.name: torch.full((tensor.shape[0],), float("nan")) for tensor in held}
    parameters = {
        tensor.name: torch.empty(tensor.shape, dtype=torch.uint8)
        if tensor.name in scales
        else torch.full(tensor.shape, float("nan"))
        for tensor in tensors
    }
    fill = read_base if isinstance(source, HFCheckpoint) else draw_base
    rounding = fill(source, tensors, parameters, scales)  # type: ignore[operator]
    assert rounding.relative().keys() == scales.keys()
    assert all(0.9 * EXPECTED < error < EXPECTED for error in rounding.relative().values())
    assert not outliers(rounding.relative())
    return parameters | {f"{name}.scale": value for name, value in scales.items()}


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("drawn", [False, True])
def test_codes_are_those_of_whole_rows(
    directory: Path, tp_size: int, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_reader, "_BLOCK_BYTES", 1800)  # a few rows: all runs are cut
    spec, source = read_model_spec(directory / "config.json"), source_of(directory, drawn)
    whole = converted(spec, source, 0, 1)
    ranks = [read(source, spec, rank, tp_size) for rank in range(tp_size)]
    for name in ("linear_proj", "linear_fc2"):
        for layer in range(spec.num_layers):
            block = "self_attention" if name == "linear_proj" else "mlp"
            key = f"decoder.layers.{layer}.{block}.{name}.weight"
            expected = encode_weight(whole[key])
            assert torch.equal(torch.cat([r[key] for r in ranks], dim=1), expected.codes_NK), key
            assert all(torch.equal(r[f"{key}.scale"], expected.scales) for r in ranks), key
    for rank, found in enumerate(ranks):
        for key, value in converted(spec, source, rank, tp_size).items():
            if "linear_qkv.weight" in key or "linear_fc1" in key:
                expected = encode_weight(value)
                assert torch.equal(found[key], expected.codes_NK), key
                assert torch.equal(found[f"{key}.scale"], expected.scales), key
            elif "linear_proj" not in key and "linear_fc2" not in key:
                assert torch.equal(found[key], value), key


def source_of(directory: Path, drawn: bool) -> WeightSource:
    if not drawn:
        return HFCheckpoint(directory)
    shapes = hf_shapes(read_model_spec(directory / "config.json"))
    return RandomWeights(shapes, seed=3, device=torch.device("cpu"), dtype=torch.float32)


def test_no_wide_weight_is_ever_made(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = read_model_spec(directory / "config.json")
    with one_process_groups():
        quantisation = quantised_on_reading(spec, UNQUANTISED)
        with _Made() as made:
            model = backbone.build_backbone(
                spec, ParallelLayout(), dtype=torch.bfloat16, quantisation=quantisation
            )
        rounding = backbone.load_backbone(model, spec, directory, ParallelLayout())
        with caplog.at_level(logging.INFO):
            log_base(quantisation, spec, model, rounding)
    assert "15 of 16 linears, 0.00 GiB; at most 0.00 GiB of weights on a rank" in caplog.text
    assert re.search(r"lose .* 0\.02.* to 0\.02.* most in layers\.[0-3]\.", caplog.text)
    assert "base_model.unquantised may name" not in caplog.text
    held = dict(quantised_linears(model))
    assert len(held) == len(rounding.relative()) == 4 * spec.num_layers - 1
    assert model.decoder.layers[1].self_attention.linear_proj.weight.dtype == torch.bfloat16
    assert not any(tensor.is_meta for tensor in model.state_dict().values() if tensor is not None)
    hidden, vocab = spec.hidden_size, spec.vocab_size
    wide = [shape for shape in made.shapes if len(shape) > 1]
    # The embedding, the head, and the linear that stays.
    assert sorted(wide) == sorted([(vocab, hidden)] * 2 + [(hidden, spec.q_size)])


class _Made(TorchDispatchMode):
    """Notes the shapes of all floating tensors that are given memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        is_wide = isinstance(made, Tensor) and made.is_floating_point() and not made.is_meta
        if is_wide and "empty" in str(func):
            self.shapes.append(tuple(made.shape))
        return made


def test_a_linear_that_loses_more_is_an_outlier() -> None:
    rounding, of_another = Rounding(), Rounding()
    rounding.add("good", torch.tensor([0.0265**2 * 4, 4.0]))
    rounding.add("bad", torch.tensor([0.02**2, 1.0]))
    of_another.add("bad", torch.tensor([0.05**2, 1.0]))
    rounding.join([of_another])
    assert outliers(rounding.relative()) == ["bad"]
