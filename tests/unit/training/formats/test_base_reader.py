"""The threaded reader fills parameters with the values of `megatron_tensors`, and names damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.base_case import FILE, UP, assert_base_is_read
from tests.helpers.tiny_models import TINY_MODEL_TYPES, TinyModelType, make_tiny_model
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.training.formats import base_reader
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint
from tlora_megatron.training.formats.rank_tensors import rank_tensors

CPU = torch.device("cpu")


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("model_type", TINY_MODEL_TYPES)
def test_parameters_are_those_of_megatron_tensors(
    tmp_path: Path, model_type: TinyModelType, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of a few rows: units of qkv, rows and what is left over are all cut.
    monkeypatch.setattr(base_reader, "_BLOCK_BYTES", 1800)
    directory = make_tiny_model(tmp_path, model_type, vocab_size=127, num_shards=2)
    assert_base_is_read(directory, CPU, tp_size=tp_size)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_any_dtype_are_cast(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    directory = make_tiny_model(tmp_path, "llama", tied=True)
    change(directory, {name: value.to(stored) for name, value in tensors_of(directory).items()})
    assert_base_is_read(directory, CPU, dtype=dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path: Path, value: float) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    tensors = tensors_of(directory)
    tensors[UP][3, 5] = value
    change(directory, tensors)
    match = rf"^{UP} of .*{FILE} must be finite, got NaN or infinity: .* fetch or convert it anew"
    with pytest.raises(ValueError, match=match):
        assert_base_is_read(directory, CPU)
    with pytest.raises(ValueError, match=match):
        HFCheckpoint(directory).read(UP)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    spec, checkpoint = read_model_spec(directory / "config.json"), HFCheckpoint(directory)
    tensors = list(
        rank_tensors(
            spec, tp_rank=0, tp_size=1, layers=range(1), with_embedding=True, with_output=True
        )
    )
    parameters = {tensor.name: torch.empty(tensor.shape) for tensor in tensors}
    (directory / FILE).write_bytes((directory / FILE).read_bytes()[:5000])
    with pytest.raises(ValueError, match=rf"{FILE} must be a complete safetensors file, got its"):
        base_reader.read_base(checkpoint, tensors, parameters)


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return dict(load_file(directory / FILE))


def change(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, directory / FILE)
