"""The backbone on GPUs equals Hugging Face's models on the CPU, in fp32.

Models with drawn weights are left out: CPU and GPU draw other numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_backbone import MODELS, WORKER, models
from tests.helpers.launch import python, torchrun

__all__ = ["models"]  # a fixture


@pytest.mark.gpu
def test_one_gpu(models: Path) -> None:
    assert "all equal" in python(WORKER, models, ",".join(MODELS), "", "recompute=full")


@pytest.mark.multigpu
def test_two_gpus(models: Path) -> None:
    variants = ("tp=2", "tp=2,sp=1", "pp=2,recompute=full", "cp=2")
    assert "all equal" in torchrun(WORKER, 2, models, ",".join(MODELS), *variants)
