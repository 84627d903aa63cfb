"""Tensor-parallel collectives between GPUs: lanes beside each other, sizes and dtypes mixed."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_ranks import COLLECTIVES as WORKER
from tests.helpers.launch import torchrun

pytestmark = pytest.mark.multigpu


def groups() -> list[int]:
    return [size for size in (2, 3, 4, 8) if size <= max(2, torch.cuda.device_count())]


@pytest.mark.parametrize("size", groups())
@pytest.mark.parametrize("kind", ["copy_engine", "nccl"])
def test_every_result_is_the_sum(kind: str, size: int) -> None:
    assert f"{kind}: all equal" in torchrun(WORKER, size, "cuda", kind)


@pytest.mark.skipif("torch.cuda.device_count() < 4", reason="needs 4 GPUs")
def test_two_groups_beside_each_other() -> None:
    assert "copy_engine: all equal" in torchrun(WORKER, 4, "cuda", "copy_engine", "halves")


def test_captured_graphs_replay() -> None:
    assert "copy_engine: all equal" in torchrun(WORKER, 2, "cuda", "copy_engine", "graph")
