"""Optimizer states that two GPUs divide: the bits of whole ones, over NCCL, with Triton's AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch import torchrun
from tests.helpers.shard_optimizer_worker import LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]
WORKER = Path(__file__).parents[1] / "helpers" / "shard_optimizer_worker.py"


def test_steps_have_the_bits_of_whole_states() -> None:
    log = torchrun(WORKER, 2)
    for name in LAYOUTS[2]:
        assert f"the same bits in {name}" in log
