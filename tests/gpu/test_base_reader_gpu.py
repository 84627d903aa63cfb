"""The threaded reader on a GPU: pinned blocks, copies on many streams, casts into parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.base_case import FILE, UP, assert_base_is_read
from tests.helpers.tiny_models import make_tiny_model
from tlora_megatron.training.formats import base_reader

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("block_bytes", [1800, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_those_of_tensors_read_one_by_one(
    tmp_path: Path,
    dtype: torch.dtype,
    block_bytes: int,
    tp_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base_reader, "_BLOCK_BYTES", block_bytes)
    directory = make_tiny_model(tmp_path, "qwen2", vocab_size=127, num_shards=2)
    assert_base_is_read(directory, GPU, tp_size=tp_size, dtype=dtype)


def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    tensors = load_file(directory / FILE)
    tensors[UP][3, 5] = float("nan")
    save_file(tensors, directory / FILE)
    with pytest.raises(ValueError, match=f"{UP} of .* must be finite"):
        assert_base_is_read(directory, GPU, dtype=torch.bfloat16)
