"""The kernels' calls of ranks that share adapters, on one GPU: a rank after the other."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.cuda_cases import CASES
from tests.helpers.kernel_case import KernelCase, make_case, make_rows, reference, run_shared
from tests.helpers.linear_case import TOLERANCE, error
from tlora_megatron.ops.lora.linear_ops import LinearOps
from tlora_megatron.ops.routing import RowGroups

pytestmark = pytest.mark.gpu

IN_SIZE = 512
Made = tuple[LinearOps, KernelCase, RowGroups, torch.Tensor, torch.Tensor]


@pytest.fixture(params=["ragged segments", "missing targets", "ranks 1 to 256", "64 adapters"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def made(name: str, ops: LinearOps) -> Made:
    """An implementation, a linear with dropout, rows, x and dy; memory to hand out holds NaN."""
    dtype = torch.bfloat16
    columns, ranks, lengths, padding = CASES[name]
    p = tuple(0.2 * (i % 3) for i in range(len(ranks)))
    case = make_case(ranks, columns, IN_SIZE, dtype=dtype, device="cuda", dropout=p)
    rows = make_rows(lengths, padding)
    generator = torch.Generator("cuda").manual_seed(1)
    x, dy = (
        torch.randn(rows.ends[-1], size, generator=generator, device="cuda").to(dtype)
        for size in (IN_SIZE, case.out_size)
    )
    torch.full((1 << 26,), float("nan"), dtype=dtype, device="cuda")
    return ops, case, rows, x, dy


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.isfinite(found).all(), what
    assert error(found, expected) < TOLERANCE[torch.bfloat16], what


def test_two_ranks_that_share_make_the_definition(made: Made) -> None:
    ops, case, rows, x, dy = made
    found, expected = run_shared(ops, case, x, dy, rows), reference(case, x, dy, rows)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        check(found[key], value, key)


def test_the_branch_of_some_rows_is_what_the_definition_adds(made: Made) -> None:
    ops, case, rows, x, dy = made
    bound, begin, end = ops.bind(case.factors, rows), 33, rows.ends[-1] - 20
    expected = reference(case, x, dy, rows)
    base_y = torch.nn.functional.linear(x.double(), case.weight_NK.double(), case.bias_N.double())
    base_dx = dy.double() @ case.weight_NK.double()
    s = bound.down(x)
    ds = bound.backward_up(dy, s)
    zeros = torch.zeros(end - begin, case.out_size, dtype=x.dtype, device="cuda")
    y, whole = (bound.up(s, b, (begin, end)) for b in (zeros, zeros + 1))
    check(y, (expected["y"] - base_y)[begin:end], "y")
    check(whole, (expected["y"] - base_y)[begin:end] + 1, "y with its base")
    dx = bound.branch_dgrad(ds, (begin, end))
    check(dx, (expected["dx"] - base_dx)[begin:end], "dx")


def test_s_of_windows_adds_up_to_the_bit(made: Made) -> None:
    """Sequence parallelism: each rank has some rows of x, and makes s of those."""
    ops, case, rows, x, _ = made
    if ops.name == "torch":
        pytest.skip("cuBLAS chooses by the number of rows")
    bound, num_rows = ops.bind(case.factors, rows), rows.ends[-1]
    window = (0, num_rows)
    base = torch.zeros(num_rows, case.out_size, dtype=x.dtype, device="cuda")
    expected = bound.up(bound.down(x), base, window)
    for cut in (1, 33, num_rows // 2, num_rows - 1):
        windows = ((0, cut), (cut, num_rows))
        first, second = (bound.down(x[a:b].clone(), (a, b)) for a, b in windows)
        assert torch.equal(bound.up(first + second, base, window), expected), cut
