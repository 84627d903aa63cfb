"""Adapters around bases that are not ours equal the fused linear and the fp64 definition.

Layer by layer, every gradient by name; whole models are in `test_built_model.py`. Transformer
Engine is a stand-in of its forward contract (`tests.helpers.te_stand_in`).
"""

from __future__ import annotations

from pathlib import Path

from tests.helpers.standing_world import forked, world

LINEARS = Path(__file__).with_name("black_box_worker.py")
GRADIENTS = Path(__file__).parents[1] / "helpers" / "te_gradients.py"


def test_linears_in_one_process() -> None:
    assert "all equal" in forked(LINEARS, "tp=1")


def test_linears_under_tensor_and_sequence_parallelism() -> None:
    assert "all equal" in world(LINEARS, 2, "tp=2", "tp=2,sp=1")


def test_the_gpu_check_runs_with_the_stand_in() -> None:
    """The check of Transformer Engine on GPUs runs here first, before it costs GPU time."""
    size = ("--hidden", 128, "--tokens", 256)
    modes = ("--modes", "local", "local-own", "te", "te-own", "te-fp8")
    assert "all modes passed" in world(GRADIENTS, 2, "--stand-in", *size, *modes)
