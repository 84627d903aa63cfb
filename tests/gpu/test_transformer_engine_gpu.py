"""Gradients of every factor around Transformer Engine's linears against Megatron's own, on GPUs.

Tolerances stand in `tests/helpers/te_gradients.py`, which prints what it measured.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.helpers.launch import REPO, python, torchrun
from tests.helpers.te_models import NEEDS_TE
from tlora_megatron.layers.transformer_engine import _rows
from tlora_megatron.ops.quantised.rows import Largest

SCRIPT = REPO / "tests" / "helpers" / "te_gradients.py"
pytestmark = NEEDS_TE


@pytest.mark.gpu
def test_one_gpu() -> None:
    assert "all modes passed" in python(SCRIPT)


@pytest.mark.gpu
def test_normed_heads() -> None:
    modes = ("local", "local-own", "te", "te-own")
    assert "all modes passed" in python(SCRIPT, "--qk-norm", "--modes", *modes)


@pytest.mark.multigpu
def test_two_gpus_with_sequence_parallelism() -> None:
    assert "all modes passed" in torchrun(SCRIPT, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kFloat8E4M3", "kFloat8E5M2"])
@pytest.mark.parametrize("kind", ["plain", "wide", "zeros", "nan", "inf", "tiny"])
def test_rows_whose_largest_is_known_have_its_quantisers_bits(kind: str, name: str) -> None:
    engine = importlib.import_module("transformer_engine_torch")
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    scales = {"tiny": 1e-38, "wide": 1e4}
    x = (torch.randn(1111, 1504, device="cuda") * scales.get(kind, 3.0)).bfloat16()
    if kind == "zeros":
        x.zero_()
    if kind in ("nan", "inf"):
        x[5, 7], x[1000, 1] = float(kind), -float(kind)
    quantizer = tensors.Float8CurrentScalingQuantizer(
        getattr(engine.DType, name), x.device, columnwise=False
    )
    sizes = x.float().abs().nan_to_num(0.0, posinf=torch.inf)
    parts = torch.zeros(256, dtype=torch.int32, device="cuda")
    parts[77] = sizes.max().view(torch.int32)
    expected, found = quantizer(x), _rows(quantizer, x, Largest(parts))
    assert torch.equal(found._data, expected._data)
    assert torch.equal(found._scale_inv, expected._scale_inv)
    assert type(found._fp8_dtype) is type(expected._fp8_dtype)
