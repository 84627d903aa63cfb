"""Built models by our kernels beside Megatron's modules: launches, memory and losses on a GPU.

Gradients against fp32 are in `test_transformer_engine_gpu.py` (`local-own`, `te-own`).
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.te_models import (
    MODES,
    NEEDS_TE,
    Batch,
    Subject,
    build,
    install_adapters,
    make_batch,
    run,
    small_spec,
)
from tlora_megatron.integrations.megatron.layer import conditions
from tlora_megatron.parallel.groups import ParallelGroups

pytestmark = pytest.mark.gpu
SPEC = small_spec(num_layers=4, hidden_size=1024)
TOKENS = 2048


class Found(NamedTuple):
    """Losses, launches and memory of one step of a mode."""

    losses: list[float]
    launches: int
    peak_bytes: int


@pytest.fixture(scope="module")
def weights(groups: ParallelGroups) -> Any:
    """A model whose weights all modes take."""
    return build(MODES["local"], SPEC, groups).model


def measure(mode: str, weights: Any, groups: ParallelGroups) -> Found:
    gc.collect()
    torch.cuda.empty_cache()
    subject = build(MODES[mode], SPEC, groups, weights)
    install_adapters(subject, b_std=0.02)
    batch = make_batch(0, TOKENS, SPEC, groups.device)
    losses = [float(loss) for loss in _run(subject, batch)]
    torch.cuda.reset_peak_memory_stats()
    begin = torch.cuda.memory_allocated()
    activities: Any = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        _run(subject, batch)
        torch.cuda.synchronize()
    launches = sum(event.count for event in trace.key_averages() if event.self_device_time_total)
    return Found(losses, launches, torch.cuda.max_memory_allocated() - begin)


def _run(subject: Subject, batch: Batch) -> list[torch.Tensor]:
    return run(subject, [batch], targets_alone=True)


@pytest.mark.parametrize("spec", ["local", pytest.param("te", marks=NEEDS_TE)])
def test_fewer_launches_no_more_memory_the_same_losses(
    spec: str, weights: Any, groups: ParallelGroups
) -> None:
    modules, own = measure(spec, weights, groups), measure(f"{spec}-own", weights, groups)
    print(modules, own)
    assert own.losses == pytest.approx(modules.losses, rel=1e-2)
    assert own.launches < 0.8 * modules.launches
    assert own.peak_bytes <= modules.peak_bytes


@pytest.mark.parametrize("half", ["self_attention", "mlp"])
@pytest.mark.parametrize(
    ("mode", "tolerance"),
    [
        ("local-own", 1e-2),
        pytest.param("te-own", 1e-2, marks=NEEDS_TE),
        pytest.param("te-fp8-own", 5e-2, marks=NEEDS_TE),
        pytest.param("te-fp8-delayed-own", 5e-2, marks=NEEDS_TE),
        pytest.param("te-fp8-blockwise-own", 5e-2, marks=NEEDS_TE),
    ],
)
def test_one_half_by_modules(
    mode: str,
    tolerance: float,
    half: str,
    weights: Any,
    groups: ParallelGroups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODES, "half", MODES[mode]._replace(foreign=half))
    own, mixed = measure(mode, weights, groups), measure("half", weights, groups)
    print(own, mixed)
    assert mixed.losses == pytest.approx(own.losses, rel=tolerance)
    assert mixed.launches > own.launches


@NEEDS_TE
def test_an_fp32_residual_stream(
    weights: Any, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "_sums_in_fp32", lambda: True)  # whatever is installed
    monkeypatch.setitem(MODES, "wide", MODES["te-own"]._replace(fp32_stream=True))
    own, wide = measure("te-own", weights, groups), measure("wide", weights, groups)
    print(own, wide)
    assert wide.losses == pytest.approx(own.losses, rel=1e-2)
    assert wide.losses != own.losses


def test_norms_that_run_again_need_less_memory(weights: Any, groups: ParallelGroups) -> None:
    once = measure("local-own", weights, groups)
    again = measure("local-own-norms-again", weights, groups)
    print(once, again)
    assert again.losses == once.losses
    two_norms = 2 * TOKENS * SPEC.hidden_size * 2
    assert again.peak_bytes <= once.peak_bytes - (SPEC.num_layers - 1) * two_norms
