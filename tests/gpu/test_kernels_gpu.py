"""The Triton and CUDA kernels of the multi-adapter linear on a GPU, against the fp64 definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
import torch

from tests.helpers.kernel_case import (
    ODD,
    KernelCase,
    assert_portions_add_up,
    columns_of,
    compare,
    gradients,
    make_case,
    make_rows,
    operands,
    poisoned_memory,
    reference,
    run,
)
from tlora_megatron.ops.dropout import dropout_reference
from tlora_megatron.ops.lora.cuda_arguments import GemmTile
from tlora_megatron.ops.lora.kernel_choice import problem_of
from tlora_megatron.ops.routing import RowGroups

pytestmark = pytest.mark.gpu

K = 512
DROPOUT = (0.3, 0.1, 0.5, 0.0)
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
WHOLE, QKV, GATE_UP = columns_of(1, 768), columns_of(2, 512, 128, 128), columns_of(1, 640, 640)
CASES = {
    "whole": (WHOLE, [[4], [64], [0], [40]]),
    "q k v": (QKV, [[4, 0, 17], [16, 64, 16], [0, 0, 0], [1, 40, 3]]),
    "gate up": (GATE_UP, [[4, 5], [16, 0], [33, 8], [64, 100]]),
    "targets that nobody has": (QKV, [[0, 4, 0], [0, 64, 0], [0, 0, 0], [0, 40, 0]]),
    "odd columns": (ODD, [[4, 5], [16, 0], [33, 8], [9, 2]]),
    "large ranks": (QKV, [[256, 256, 256], [16, 16, 16], [0, 200, 0], [8, 8, 8]]),
}
WORKLOADS = {
    "ragged": (5, 1300, 700, 333),
    "absent": (0, 611, 0, 2570),
    "one adapter": (0, 0, 0, 3000),
    "short": (1, 63, 7, 2),
    "none": (0, 0, 0, 0),
}


if TYPE_CHECKING:
    from tlora_megatron.ops.lora.linear_ops import LinearOps

MakeOps = Callable[..., "LinearOps"]


@pytest.fixture(params=["triton", "cuda 128", "cuda 192", "cuda 256"])
def make_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeOps:
    """Makes Triton's ops, or CUDA's with GEMM tiles so wide at sizes they are not for."""
    name, _, width = request.param.partition(" ")
    dtype = request.node.callspec.params.get("dtype", torch.bfloat16)
    if problem := problem_of(name, torch.device("cuda"), dtype):
        pytest.skip(problem)
    from tlora_megatron.ops.lora import cuda_ops
    from tlora_megatron.ops.lora.triton_ops import TritonOps  # needs triton

    if name == "triton":
        return TritonOps
    monkeypatch.setattr(cuda_ops, "gemm_tile", lambda *_: GemmTile(int(width)))
    return lambda: cuda_ops.CudaOps(TritonOps())


def gpu_case(
    linear: str, dtype: torch.dtype = torch.bfloat16, dropout: Sequence[float] = DROPOUT
) -> KernelCase:
    columns, ranks = CASES[linear]
    return make_case(ranks, columns, K, dtype=dtype, device="cuda", dropout=dropout)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dropout", [(), DROPOUT], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("linear", CASES)
def test_every_output_and_gradient_equals_the_definition(
    linear: str, workload: str, dropout: tuple[float, ...], dtype: torch.dtype, make_ops: MakeOps
) -> None:
    check(make_ops(), gpu_case(linear, dtype, dropout), make_rows(WORKLOADS[workload], padding=6))


def check(ops: LinearOps, case: KernelCase, rows: RowGroups) -> None:
    x, dy = operands(case, rows.ends[-1])
    with poisoned_memory():
        actual = run(ops, case, x, dy, rows)
    compare(actual, reference(case, x, dy, rows), TOLERANCE[x.dtype])


def test_two_runs_are_bitwise_equal(make_ops: MakeOps) -> None:
    case = gpu_case("q k v")
    rows = make_rows((900, 2000, 1, 2500))
    x, dy = operands(case, rows.ends[-1])
    ops = make_ops()
    first = run(ops, case, x, dy, rows)
    for _ in range(5):
        for name, value in run(ops, case, x, dy, rows).items():
            assert torch.equal(first[name], value), name


@pytest.mark.parametrize("dropout", [(), DROPOUT], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("linear", CASES)
def test_portions_leave_the_bits_of_micro_batches_one_after_another(
    linear: str, dropout: tuple[float, ...], make_ops: MakeOps
) -> None:
    """Portions of one run and of several, a short one, and a job with a single portion."""
    case = gpu_case(linear, dropout=dropout)
    cuts = (1000, 1024, 2048, 3300, 4700)
    rows = make_rows((2900, 700, 0, 3300), padding=77, budget=8192, cuts=cuts)
    x, dy = operands(case, rows.ends[-1])
    ops = make_ops()
    compare(run(ops, case, x, dy, rows), reference(case, x, dy, rows), TOLERANCE[x.dtype])
    for _ in range(3):
        assert_portions_add_up(ops, case, x, dy, rows)


def test_launches_in_a_row_add_to_the_same_gradients(make_ops: MakeOps) -> None:
    """A kernel that starts before the last one has ended must not touch what that one adds to."""
    case = gpu_case("q k v", dropout=())
    rows = make_rows((900, 2000, 1, 2500))
    x, dy = operands(case, rows.ends[-1])
    ops = make_ops()
    once = run(ops, case, x, dy, rows)
    bound = ops.bind(case.factors, rows)
    _, s = bound.forward(x, case.weight_NK, None)
    ds = bound.backward_up(dy, s)
    gradients(case.factors)
    for _ in range(4):
        bound.backward_down(x, dy, s, ds, (0, len(x)))
    for name, grad in gradients(case.factors).items():
        if name[1] == "A" or ops.name == "cuda":  # Triton adds dB with dS
            torch.testing.assert_close(grad, 4 * once[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("linear", ["q k v", "gate up"])
def test_bits_are_those_of_the_job_in_other_company(linear: str, make_ops: MakeOps) -> None:
    """Behind more rows or fewer, and in a fuller micro-batch."""
    case = gpu_case(linear)
    ops = make_ops()
    own_x, own_dy = operands(case, 1300, seed=1)
    found = []
    companies = ((0, 1300, 0, 0, 0), (711, 1300, 3, 600, 46), (5, 1300, 7539, 0, 7540))
    for *lengths, padding in companies:
        rows = make_rows(lengths, padding, budget=16384)
        x, dy = operands(case, rows.ends[-1])
        own = slice(rows.ends[0], rows.ends[1])
        x[own], dy[own] = own_x, own_dy
        actual = run(ops, case, x, dy, rows)
        found.append({n: v for n, v in actual.items() if n[2:].startswith("[1]")})
        if ops.name == "cuda":  # Triton leaves the base to cuBLAS, which chooses by the rows
            found[-1].update({n: actual[n][own] for n in ("y", "dx")})
    for name in found[0]:
        for other in found[1:]:
            assert torch.equal(found[0][name], other[name]), name


@pytest.mark.parametrize("what", ["rows", "weights"])
def test_nan_of_one_adapter_stays_there(what: str, make_ops: MakeOps) -> None:
    case = gpu_case("q k v")
    rows = make_rows(WORKLOADS["ragged"], padding=6)
    x, dy = operands(case, rows.ends[-1])
    ops = make_ops()
    if what == "weights" and ops.name == "cuda":
        pytest.skip("the CUDA GEMM relies on finite weights, which the bank sees to")
    clean = run(ops, case, x, dy, rows)
    own = slice(rows.ends[0], rows.ends[1])
    if what == "rows":
        x[own] = dy[own] = float("nan")
    else:
        begins = case.layout.a_begin
        case.factors.lora_a[begins[1][0] : begins[2][0]] = float("inf")
        for p, lora in enumerate(case.factors.lora_b):
            lora[case.layout.b_begin[1][p] : case.layout.b_begin[2][p]] = float("nan")
    ill = run(ops, case, x, dy, rows)
    for name, value in clean.items():
        if name in ("y", "dx"):
            assert torch.equal(ill[name][: own.start], value[: own.start]), name
            assert torch.equal(ill[name][own.stop :], value[own.stop :]), name
        elif not name[2:].startswith("[1]"):
            assert torch.equal(ill[name], value), name


def mask_case(dtype: torch.dtype) -> tuple[KernelCase, RowGroups, torch.Tensor, torch.Tensor]:
    """A linear whose A is one, its rows, ones in the place of x, and what of them is kept."""
    p = (0.25, 0.1, 0.7, 1e-5)
    case = make_case([[256]] * 4, columns_of(1, 256), 256, dtype=dtype, device="cuda", dropout=p)
    rows = make_rows((400, 3, 1000, 200))
    for slot in range(4):
        begin = case.layout.a_begin[slot][0]
        case.factors.lora_a[begin : begin + 256] = torch.eye(256)
    ones = torch.ones(rows.ends[-1], 256, device="cuda", dtype=dtype)
    p_T = torch.tensor((*p, 0.0), device="cuda")[rows.row_slots(ones.device)]
    key, column = case.factors.dropout_key, case.factors.first_column
    keep = dropout_reference(ones, rows.row_keys(ones.device), p_T, key, column) != 0
    return case, rows, ones, keep


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_mask_is_that_of_the_definition(dtype: torch.dtype, make_ops: MakeOps) -> None:
    case, rows, ones, keep = mask_case(dtype)
    ops = make_ops()
    nothing = torch.zeros(256, 256, device="cuda", dtype=dtype)
    bound = ops.bind(case.factors, rows)
    _, s = bound.forward(ones, nothing, None)
    plan = bound.plan
    row_form = s.flatten()[plan.num_chunks * 16 * 256 :][: ones.numel()].view_as(ones)
    assert torch.equal(row_form != 0, keep)
    ds = torch.ones_like(s)
    dx = bound.dgrad(torch.zeros_like(ones), ds, nothing)
    tile = slice(512, 768)  # of one slot only: all of dS is 1 there
    assert torch.equal(dx[tile] != 0, keep[tile])


def test_1024_adapters(make_ops: MakeOps) -> None:
    lengths = [3 + i % 11 for i in range(1024)]
    lengths[17] = 0
    ranks = [[1 + i % 24] for i in range(1024)]
    case = make_case(ranks, WHOLE, K, dtype=torch.bfloat16, device="cuda")
    check(make_ops(), case, make_rows(lengths, padding=9))
