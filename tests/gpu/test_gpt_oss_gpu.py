"""Experts of gpt-oss on a GPU in bfloat16: those of a CPU in fp32, without waits for the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tlora_megatron.integrations.megatron.layer.frozen_experts import FrozenExperts
from tlora_megatron.model.spec import ClampedGlu, ExpertsSpec

pytestmark = pytest.mark.gpu

HIDDEN, ROWS = 320, 777
SPEC = ExpertsSpec(
    num_experts=4,
    top_k=4,  # all, so that no choice hangs on rounding
    ffn_size=192,
    normalizes=True,
    glu=ClampedGlu(alpha=1.702, limit=7.0),
)


def results(monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and dx of a block whose values bfloat16 holds."""
    draw = torch.Generator().manual_seed(0)
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        params_dtype=dtype,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
    )
    with monkeypatch.context() as patch:  # parameters are made where the process has its device
        if device == "cpu":
            patch.setattr(torch.cuda, "current_device", lambda: device)
        experts = FrozenExperts(config, spec=SPEC, ep_size=1, expert_tp=1)
    for parameter in experts.parameters():
        parameter.data.copy_((torch.randn(parameter.shape, generator=draw) / 8).bfloat16())
    x, dy = (
        torch.randn(ROWS, HIDDEN, generator=draw).bfloat16().to(device, dtype) for _ in range(2)
    )
    waits = torch.cuda.is_available() and device != "cpu"
    experts.requires_grad_(False)
    for _ in range(2):  # the first time kernels are compiled
        y, back = experts.compute_vjp(x)
        dx = back(dy)
        if waits:
            torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    return {"y": y.double().cpu(), "dx": dx.double().cpu()}


def test_a_block_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(monkeypatch, "cpu", torch.float32)
    found = results(monkeypatch, "cuda", torch.bfloat16)
    for name, value in expected.items():
        # Not the largest error: a value at the limit has a gradient or none, as it is rounded.
        error = (found[name] - value).norm() / value.norm()
        assert error < 2e-2, f"{name}: {error:.2e}"
