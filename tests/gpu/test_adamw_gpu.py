"""The multi-adapter AdamW on a GPU: torch's numbers, one launch, no wait for the device."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.adam_case import AdamCase, take_steps
from tlora_megatron.ops.adamw import fused_adamw
from tlora_megatron.ops.lora.kernel_choice import triton_problem

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
SIZES = (1, 5_000, 2_048, 777, 1_000_003, 4_194_304)


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton" and (problem := triton_problem(GPU)):
        pytest.skip(problem)
    monkeypatch.setenv("TLORA_KERNELS", request.param)
    return str(request.param)


def compare(case: AdamCase, kernels: str) -> None:
    """Against the definition; torch's own fused kernel rounds `1 - beta2` to fp32, 1.3e-5 off."""
    if kernels == "triton":
        case.compare()


def make_cases() -> list[AdamCase]:
    return [AdamCase(i, size, GPU) for i, size in enumerate(SIZES)]


@pytest.mark.parametrize("tensor_clip", [False, True], ids=["number", "tensor"])
def test_many_steps_equal_the_definition(tensor_clip: bool, kernels: str) -> None:
    cases = make_cases()
    take_steps(fused_adamw, cases, 10, tensor_clip=tensor_clip)
    for case in cases:
        compare(case, kernels)


def test_a_clip_not_finite_skips_the_job_alone(kernels: str) -> None:
    cases = make_cases()
    before = [t.clone() for t in cases[3].state()]
    updates = [case.update(torch.ones((), device=GPU)) for case in cases]
    updates[3].grad.fill_(math.nan)
    updates[3] = updates[3]._replace(clip=torch.tensor(math.nan, device=GPU))
    fused_adamw(updates)
    assert cases[3].state_equals(before)
    for case, update in zip(cases, updates, strict=True):
        assert not update.grad.any()
        if case is not cases[3]:
            case.step_reference(1.0)
            compare(case, kernels)


@pytest.mark.usefixtures("kernels")
def test_alone_is_together_bit_for_bit() -> None:
    together, alone = make_cases(), make_cases()
    fused_adamw([case.update(0.5) for case in together])
    for case in alone:
        fused_adamw([case.update(0.5)])
    for left, right in zip(together, alone, strict=True):
        assert left.state_equals(right.state())


def test_unaligned_views_leave_the_rest_alone(kernels: str) -> None:
    case = AdamCase(0, 5_001, GPU)
    case.step_within(fused_adamw)
    compare(case, kernels)


@pytest.mark.usefixtures("kernels")
def test_no_wait_for_the_device() -> None:
    cases = make_cases()
    clips = torch.full((len(cases),), 0.5, device=GPU)
    updates = [case.update(clip) for case, clip in zip(cases, clips, strict=True)]
    fused_adamw(updates)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_adamw(updates)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_launch_whatever_the_number_of_updates(kernels: str) -> None:
    if kernels == "torch":
        pytest.skip("a call an update")
    cases = [AdamCase(i, 100 * i + 1, GPU) for i in range(40)]
    updates = [case.update(0.5) for case in cases]
    fused_adamw(updates)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fused_adamw(updates)
        torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
    assert sorted(name.split(" ")[0] for name in on_device) == ["Memcpy", "_adamw_kernel"]
