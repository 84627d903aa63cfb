"""Fixtures of tests that build models in one process on a GPU, or try every implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from tests.helpers.one_process import one_process_groups
from tlora_megatron.ops.lora.kernel_choice import Kernels, choose_ops, problem_of
from tlora_megatron.ops.lora.linear_ops import LinearOps
from tlora_megatron.parallel.groups import ParallelGroups


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    with one_process_groups() as groups:
        yield groups


@pytest.fixture(params=get_args(Kernels))
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LinearOps:
    """Each implementation, forced; skips where it does not run in the test's dtype."""
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = request.node.callspec.params.get("dtype", torch.bfloat16)
    if problem := problem_of(request.param, device, dtype):
        pytest.skip(problem)
    monkeypatch.setenv("TLORA_KERNELS", request.param)
    return choose_ops(device, dtype)


@pytest.fixture
def hopper() -> None:
    if problem := problem_of("cuda", torch.device("cuda"), torch.bfloat16):
        pytest.skip(problem)
