"""Kernels that keep what is not finite in its own document, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.helpers.interpreter import COMPILES, DEVICE, RUNS, compiled_for
from tlora_megatron.ops.frozen import flash4_guard

HEAD = 16
BEGINS = (0, 5, 205, 206, 400)
"""Four documents, and ten rows behind them."""
ROWS = 410


def drawn(heads: int) -> Tensor:
    """`[ROWS, heads, HEAD]`, cut out of wider rows and heads."""
    torch.manual_seed(heads)
    return torch.randn(ROWS, heads + 1, HEAD + 8, device=DEVICE)[:, 1:, 8:]


def inputs() -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    begins = torch.tensor(BEGINS, dtype=torch.int32, device=DEVICE)
    return [drawn(3), drawn(2), drawn(2).bfloat16()], (begins, begins)


@RUNS
def test_kernels_leave_finite_rows_alone() -> None:
    tensors, begins = inputs()
    kept = [x.clone() for x in tensors]
    guard, *found = flash4_guard.guard_inputs(*tensors, begins)
    assert all(torch.equal(x, y) for x, y in zip(found, kept, strict=True))
    assert not guard.marks.any()
    out = drawn(3).clone()
    assert torch.equal(flash4_guard.guard_output(guard, out.clone()), out)


@RUNS
@pytest.mark.parametrize(
    ("which", "value", "row", "document"),
    [
        (0, float("nan"), 0, 0),
        (1, float("inf"), 5, 1),
        (2, -1e30, 132, 1),
        (0, float("nan"), 133, None),
        (1, 1e18, 205, 2),
        (2, float("-inf"), 406, 4),
    ],
)
def test_kernels_mark_a_document_and_tell_it(
    which: int, value: float, row: int, document: int | None
) -> None:
    tensors, begins = inputs()
    tensors[which][row, 1, HEAD - 1] = value
    expected = [x.clone() for x in tensors]
    if document is not None:
        expected[which][row, 1, HEAD - 1] = 0.0
    guard, *found = flash4_guard.guard_inputs(*tensors, begins)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
    assert guard.marks.nonzero().flatten().tolist() == ([] if document is None else [document])
    out, own = drawn(3).clone(), slice(0)
    if document is not None and document < 4:
        own = slice(BEGINS[document], BEGINS[document + 1])
    told = flash4_guard.guard_output(guard, out.clone())
    assert told[own].isnan().all()
    told[own] = out[own]
    assert torch.equal(told, out)


@RUNS
def test_kernels_guard_gradients() -> None:
    """A value of dout alone: the document's gradients are NaN, and no others."""
    tensors, begins = inputs()
    leaves = [x.float().requires_grad_() for x in tensors]
    guard, q, k, v = flash4_guard.guard_inputs(*leaves, begins)
    out = flash4_guard.guard_output(guard, q * (k.sum() + v.sum()).detach() + 0 * q.sum())
    out = out + (k.sum(1, keepdim=True) + v.sum(1, keepdim=True)).expand_as(out)
    dout = drawn(3).clone()
    dout[7, 0, 0] = float("inf")
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert guard.marks.tolist() == [0, 1, 0, 0, 0]
    for gradient in (dq, dk, dv):
        assert gradient[5:205].isnan().all()
        assert gradient[:5].isfinite().all()
        assert gradient[205:].isfinite().all()


@COMPILES
def test_kernels_compile_for_hopper() -> None:
    for kernel, numbers in (
        (flash4_guard._search_kernel, flash4_guard._SEARCH_NUMBERS),
        (flash4_guard._tell_kernel, flash4_guard._TELL_NUMBERS),
    ):
        types = dict.fromkeys(("q", "k", "v"), "*bf16") | dict.fromkeys(numbers, "i32")
        types |= dict.fromkeys(("query_begins", "key_begins", "marks"), "*i32")
        made = compiled_for(kernel, types, {"HEAD": 128}, num_warps=4)
        assert "st.global" in made["ptx"]
