"""Gradients of every factor around Transformer Engine's linears against Megatron's own, on GPUs.

Tolerances stand in `tests/helpers/te_gradients.py`, which prints what it measured.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.launch import REPO, python, torchrun

SCRIPT = REPO / "tests" / "helpers" / "te_gradients.py"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs transformer_engine"
)


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
