"""Gradients of every factor around Transformer Engine's linears against Megatron's own, on GPUs.

Tolerances stand in `scripts/bench/te_adapters.py`, which prints what it measured.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.bench_modules import BENCH
from tests.helpers.launch import python, torchrun

SCRIPT = BENCH / "te_adapters.py"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs transformer_engine"
)


@pytest.mark.gpu
def test_one_gpu() -> None:
    assert "all modes passed" in python(SCRIPT, "check")


@pytest.mark.multigpu
def test_two_gpus_with_sequence_parallelism() -> None:
    assert "all modes passed" in torchrun(SCRIPT, 2, "check")
