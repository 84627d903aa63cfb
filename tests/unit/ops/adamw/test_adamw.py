"""The multi-adapter AdamW against `torch.optim.AdamW`: the torch path, and the kernel interpreted.

Triton decides when it is imported whether it interprets, so the kernel's tests run in the process
of `test_interpreted_kernels`: `TRITON_INTERPRET=1 pytest` on this file runs them here.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.adam_case import BUFFERS, HYPERS, SIZES, AdamCase, Step, take_steps
from tests.helpers.interpreter import INTERPRETED
from tlora_megatron.ops.adamw import fused_adamw

CPU = torch.device("cpu")


@pytest.fixture(params=["kernel" if INTERPRETED else "torch"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Step:
    if request.param == "kernel":
        monkeypatch.setenv("TLORA_KERNELS", "triton")
    return fused_adamw


@pytest.mark.parametrize("tensor_clip", [False, True], ids=["number", "tensor"])
def test_many_steps_equal_torch_s(step: Step, tensor_clip: bool) -> None:
    cases = [AdamCase(i, size, CPU) for i, size in enumerate(SIZES)]
    take_steps(step, cases, 5 if INTERPRETED else 20, tensor_clip=tensor_clip)
    for case in cases:
        case.compare()


def test_one_after_another_is_together(step: Step) -> None:
    """Bitwise: a job's update does not depend on its neighbours."""
    together = [AdamCase(i, size, CPU) for i, size in enumerate(SIZES)]
    alone = [AdamCase(i, size, CPU) for i, size in enumerate(SIZES)]
    for _ in range(3):
        step([case.update(0.5) for case in together])
        for case in reversed(alone):
            step([case.update(0.5)])
    for left, right in zip(together, alone, strict=True):
        assert left.state_equals(right.state())


@pytest.mark.parametrize("clip", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor_clip", [False, True], ids=["number", "tensor"])
def test_a_clip_not_finite_skips_the_job_alone(step: Step, tensor_clip: bool, clip: float) -> None:
    cases = [AdamCase(i, 3000, CPU) for i in range(3)]
    step([case.update(1.0) for case in cases])
    for case in cases:
        case.step_reference(1.0)
    before = [t.clone() for t in cases[1].state()]
    updates = [case.update(1.0) for case in cases]
    updates[1].grad[7] = math.nan
    updates[1] = updates[1]._replace(clip=torch.tensor(clip) if tensor_clip else clip)
    step(updates)
    assert cases[1].state_equals(before)
    for case, update in zip(cases, updates, strict=True):
        assert not update.grad.any()
        if case is not cases[1]:
            case.step_reference(1.0)
            case.compare()


def test_zero_clip_still_decays_and_moves_on_momentum(step: Step) -> None:
    case = AdamCase(0, 100, CPU)
    for clip in (1.0, 0.0):
        step([case.update(clip)])
        case.step_reference(clip)
    case.compare()


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 2049])
def test_sizes_around_a_block_leave_the_rest_alone(step: Step, size: int) -> None:
    case = AdamCase(1, size, CPU)
    case.step_within(step)
    case.compare()


def test_more_updates_than_columns_at_first(step: Step) -> None:
    cases = [AdamCase(i, 3, CPU) for i in range(70)]
    step([case.update(0.5) for case in cases])
    for case in cases:
        case.step_reference(0.5)
        case.compare()


def test_late_steps_and_small_decay(step: Step) -> None:
    """Bias corrections near 1 and a decay below fp32's unit of 1 come out right."""
    case = AdamCase(0, 500, CPU, hyper=HYPERS[0]._replace(lr=1e-4, weight_decay=1e-3))
    case.start_at(99_999)
    step([case.update(1.0)])
    case.step_reference(1.0)
    case.compare()


@pytest.mark.parametrize("begin", [1, 3, 17, 400])
def test_a_part_has_the_bits_that_it_has_in_the_whole(step: Step, begin: int) -> None:
    """Unlike replicas update the same elements as parts of unlike slabs, and must stay equal."""
    whole = AdamCase(0, 1003, CPU).update(0.37)
    own = slice(begin, begin + 555)
    part = whole._replace(**{name: getattr(whole, name)[own].clone() for name in BUFFERS})
    step([whole])
    step([part])
    for name in BUFFERS:
        assert torch.equal(getattr(part, name), getattr(whole, name)[own]), name


def test_no_updates_are_none() -> None:
    fused_adamw([])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"step": 0}, "step must be at least 1, got 0"),
        ({"grad": torch.zeros(9)}, r"grad must be contiguous fp32 \[8\] on cpu, got .* \[9\]"),
        ({"grad": torch.zeros(16)[::2]}, r"grad must be contiguous fp32 \[8\]"),
        ({"exp_avg": torch.zeros(8).double()}, r"exp_avg must be .*, got torch.float64"),
        ({"exp_avg_sq": torch.zeros(2, 4)}, r"exp_avg_sq must be .*\[2, 4\]"),
        ({"clip": torch.ones(1)}, r"clip must be a number or fp32 \[\] on cpu, got .* \[1\]"),
        ({"clip": torch.ones(()).double()}, r"clip must be .*, got torch.float64"),
    ],
)
def test_refusals(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fused_adamw([AdamCase(0, 8, CPU).update(1.0)._replace(**change)])
