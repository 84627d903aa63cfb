"""The Triton kernels of the multi-adapter linear in the interpreter, against the fp64 definition.

Triton decides when it is imported whether it interprets, so the tests run in a process of their
own: `TRITON_INTERPRET=1 pytest` on this file runs them here.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.helpers.cuda_cases import CASES as CUDA_CASES
from tests.helpers.interpreter import INTERPRETED, interpreted
from tests.helpers.item_machine import ItemMachine
from tests.helpers.kernel_case import CASES as SHAPES
from tests.helpers.kernel_case import (
    ODD,
    WHOLE,
    KernelCase,
    assert_portions_add_up,
    compare,
    gradients,
    make_case,
    make_rows,
    operands,
    poisoned_memory,
    reference,
    run,
    run_shared,
)
from tests.helpers.launch import python
from tests.helpers.linear_case import error
from tlora_megatron.ops.dropout import dropout_reference
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.lora import cuda_ops, triton_ops
from tlora_megatron.ops.lora import triton_parts as triton_gather
from tlora_megatron.ops.lora.linear_ops import SiteFactors, are_aligned
from tlora_megatron.ops.lora.rank_places import gather_or_zero
from tlora_megatron.ops.lora.triton_ops import TritonOps
from tlora_megatron.ops.lora.triton_work_items import (
    BackwardDownConfig,
    BackwardUpConfig,
    DownConfig,
    KernelConfig,
    UpConfig,
)
from tlora_megatron.ops.routing import RowGroups

K = 80
SMALL = KernelConfig(
    down=DownConfig(block_rows=32, block_depth=32, splits=2, rank_tile=32),
    up=UpConfig(block_rows=64, block_columns=32),
    backward_up=BackwardUpConfig(
        block_rows=32,
        block_depth=16,
        split_columns=16,
        block_columns=16,
        step_rows=32,
        rows_per_run=64,
        item_size=2048,
        region_rows=64,
        rank_tile=32,
    ),
    backward_down=BackwardDownConfig(
        block_columns=32, step_rows=32, rows_per_run=64, item_size=2048, rank_tile=32
    ),
)
"""Small blocks, so that every kernel splits, loops, straddles tiles and passes over ranks twice."""
CASES = {**SHAPES, "odd columns": (ODD, [[4, 5], [16, 0], [33, 8], [9, 2]])}
WORKLOADS = {
    "ragged": (5, 70, 40, 9),
    "absent": (0, 33, 0, 130),
    "one adapter": (0, 0, 0, 130),
    "none": (0, 0, 0, 0),
}


Made = tuple[KernelCase, RowGroups, torch.Tensor, torch.Tensor]


def made(
    name: str,
    rows: RowGroups,
    *,
    dtype: torch.dtype = torch.float32,
    dropout: tuple[float, ...] = (0.3, 0.1, 0.5, 0.0),
) -> Made:
    """A case, its rows, and their x and dy."""
    columns, ranks = CASES[name]
    case = make_case(ranks, columns, K, dtype=dtype, dropout=dropout)
    return case, rows, *operands(case, rows.ends[-1])


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreting process")
def test_the_kernels_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert " passed" in python("-m", "pytest", "-q", __file__, "-p", "no:cacheprovider")


@interpreted
@pytest.mark.parametrize(
    ("linear", "workload"),
    [
        *((linear, "ragged") for linear in CASES),
        *(("q k v", w) for w in WORKLOADS if w != "ragged"),
    ],
)
def test_every_output_and_gradient_equals_the_definition(linear: str, workload: str) -> None:
    dropout = (0.3, 0.1, 0.5, 0.0) if linear in ("whole", "q k v") else ()
    case, rows, x, dy = made(linear, make_rows(WORKLOADS[workload], padding=6), dropout=dropout)
    with poisoned_memory():
        actual = run(TritonOps(config=SMALL), case, x, dy, rows)
    compare(actual, reference(case, x, dy, rows), 5e-7)


@interpreted
def test_half_precision_and_the_default_blocks() -> None:
    rows = make_rows(WORKLOADS["ragged"], padding=6)
    case, rows, x, dy = made("q k v", rows, dtype=torch.float16)
    with poisoned_memory():
        actual = run(TritonOps(config=KernelConfig()), case, x, dy, rows)
    compare(actual, reference(case, x, dy, rows), 2e-3)


@interpreted
def test_portions_add_up_as_micro_batches_one_after_another() -> None:
    rows = make_rows((44, 7, 0, 21), 3, budget=100, cuts=(20, 48, 60))
    case, rows, x, dy = made("q k v", rows)
    ops = TritonOps(config=SMALL)
    with poisoned_memory():
        compare(run(ops, case, x, dy, rows), reference(case, x, dy, rows), 5e-7)
        assert_portions_add_up(ops, case, x, dy, rows)


@interpreted
@pytest.mark.parametrize("lengths", [(5, 20, 7, 9), (0, 0, 0, 0)])
def test_the_branch_alone_is_what_the_linear_adds_to_its_base(lengths: tuple[int, ...]) -> None:
    case, rows, x, dy = made("q k v", make_rows(lengths, padding=6))
    bound = TritonOps(config=SMALL).bind(case.factors, rows)
    y_base, dx_base = x @ case.weight_NK.t(), dy @ case.weight_NK
    with poisoned_memory():
        y, s = bound.forward(x, case.weight_NK, None)
        dx = bound.dgrad(dy, bound.backward_up(dy, s), case.weight_NK)
        alone = bound.down(x)
        ds = bound.backward_up(dy, alone)
        for begin, end in ((0, len(x)), (0, 3), (3, len(x)), (4, 5)):
            window = slice(begin, end)
            y_alone = bound.up(alone, y_base[window], (begin, end))
            dx_alone = bound.branch_dgrad(ds, (begin, end))
            torch.testing.assert_close(y_alone, y[window], rtol=1e-5, atol=1e-5)
            dx_sum = dx_base[window] + dx_alone
            torch.testing.assert_close(dx_sum, dx[window], rtol=1e-5, atol=1e-5)
    assert torch.equal(y_base, y) != any(lengths)


@interpreted
@pytest.mark.parametrize("bias", [True, False])
def test_with_exactness_the_base_is_added_to_the_rank_part_whoever_is_there(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody adapts these rows: the GEMM is all the same the one that they have beside others."""

    def never(*args: object) -> torch.Tensor:
        raise AssertionError("the GEMM must add onto the rank part")

    rows = dataclasses.replace(make_rows((0, 0, 0, 0), padding=6), exactness=Exactness())
    case, rows, x, dy = made("q k v", rows, dropout=())
    bound = TritonOps().bind(case.factors, rows)
    bias_N = case.bias_N if bias else None
    expected = torch.nn.functional.linear(x, case.weight_NK, bias_N)
    monkeypatch.setattr(triton_ops.F, "linear", never)
    with poisoned_memory():
        y, s = bound.forward(x, case.weight_NK, bias_N)
        dx = bound.dgrad(dy, bound.backward_up(dy, s), case.weight_NK)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, dy @ case.weight_NK, rtol=1e-5, atol=1e-5)


@interpreted
def test_the_branch_reads_what_the_cuda_kernels_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep the chunks first too, and dropout's `1 / (1 - p)` in dS."""
    columns, ranks, lengths, padding = CUDA_CASES["missing targets"]
    case = make_case(ranks, columns, K, dtype=torch.float32, dropout=(0.3, 0.1, 0.5, 0.0))
    rows, factors = make_rows(lengths, padding), case.factors
    x, dy = operands(case, rows.ends[-1])
    machine = ItemMachine(factors)
    monkeypatch.setattr(cuda_ops, "UP_BLOCKS", SMALL.up)
    bound = cuda_ops.CudaOps(TritonOps()).bind(factors, rows)
    for name in ("rank_rows", "multiprocessors"):
        monkeypatch.setattr(cuda_ops, name, getattr(machine, name))
    begin, end = window = (40, 170)
    base = torch.randn(end - begin, case.out_size, generator=torch.Generator().manual_seed(0))
    with poisoned_memory():
        s = bound.down(x)
        ds = bound.backward_up(dy, s)
        y = bound.up(s, base, window)
        dx = bound.branch_dgrad(ds, window)
    assert s.dim() == ds.dim() == 1
    expected = reference(case, x, dy, rows)
    whole_y = torch.nn.functional.linear(x.double(), case.weight_NK.double(), case.bias_N.double())
    branch = (expected["y"] - whole_y)[begin:end]
    assert error(y, branch + base) < 5e-7
    assert error(dx, (expected["dx"] - dy.double() @ case.weight_NK.double())[begin:end]) < 5e-7


@interpreted
@pytest.mark.parametrize("is_fallback", [True, False])
def test_ranks_that_share_make_the_definition(is_fallback: bool) -> None:
    """The linear's gradients lie off 16 bytes, which no CUDA kernel supports."""
    columns, ranks, lengths, padding = CUDA_CASES["missing targets"]
    case = make_case(ranks, columns, K, dtype=torch.float32, dropout=(0.3, 0.1, 0.5, 0.0))
    case = dataclasses.replace(case, factors=shifted_gradients(case.factors))
    rows = make_rows(lengths, padding)
    x, dy = operands(case, rows.ends[-1])
    with poisoned_memory():
        ops = TritonOps(config=SMALL)
        found = run_shared(cuda_ops.CudaOps(ops) if is_fallback else ops, case, x, dy, rows)
    compare(found, reference(case, x, dy, rows), 5e-7)


def shifted_gradients(factors: SiteFactors) -> SiteFactors:
    """Gradients of a slab in which another linear has an odd size: only A's lie at 16 bytes."""
    shifted = tuple(
        tuple(None if g is None else torch.zeros(g.numel() + 1)[1:].view_as(g) for g in slot)
        for slot in factors.grad_b
    )
    return dataclasses.replace(factors, grad_b=shifted, is_aligned=are_aligned(shifted))


@interpreted
@pytest.mark.parametrize("count", [1, 1024, 2500])
def test_a_gather_gives_zero_where_there_is_no_place(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 3, generator=generator)
    places = torch.randint(0, values.numel() + 1, (count,), generator=generator, dtype=torch.int32)
    places[::3] = 0
    with poisoned_memory():
        found = triton_gather.gather(values, places)
    assert torch.equal(found, gather_or_zero(values, places))
    assert torch.equal(found[1::3], torch.cat([torch.zeros(1), values.flatten()])[places[1::3]])


@interpreted
def test_evaluation_has_no_dropout() -> None:
    rows = dataclasses.replace(make_rows(WORKLOADS["ragged"]), dropout_keys=())
    case, rows, x, dy = made("whole", rows)
    compare(run(TritonOps(config=SMALL), case, x, dy, rows), reference(case, x, dy, rows), 5e-7)


@interpreted
@pytest.mark.parametrize("column", [0, 6, 96, 1001])
def test_the_mask_is_that_of_the_definition(column: int) -> None:
    p = (0.25, 0.1, 0.7, 1e-5)
    case = make_case([[K]] * 4, WHOLE, K, dtype=torch.float32, dropout=p)
    case = dataclasses.replace(case, factors=dataclasses.replace(case.factors, first_column=column))
    rows = make_rows((20, 3, 40, 17))
    for slot in range(4):
        begin = case.layout.a_begin[slot][0]
        case.factors.lora_a[begin : begin + K] = torch.eye(K)
    ones = torch.ones(rows.ends[-1], K)
    p_T = torch.tensor((*p, 0.0))[rows.row_slots(ones.device)]
    key = case.factors.dropout_key
    expected = dropout_reference(ones, rows.row_keys(ones.device), p_T, key, column) != 0
    ops = TritonOps(config=SMALL)
    bound = ops.bind(case.factors, rows)
    s, plan = bound.down(ones), bound.plan
    row_form = s[plan.num_chunks * 16 :].flatten()[: rows.ends[-1] * K].view(-1, K)
    assert torch.equal(row_form != 0, expected)
    assert 0 < (~expected).sum() < expected.numel()


@interpreted
def test_nan_of_one_adapter_stays_there() -> None:
    case, rows, x, dy = made("q k v", make_rows(WORKLOADS["ragged"], padding=6))
    ops = TritonOps(config=SMALL)
    clean = run(ops, case, x, dy, rows)
    begin, end = rows.ends[0], rows.ends[1]
    ill_x, ill_dy = x.clone(), dy.clone()
    ill_x[begin:end] = ill_dy[begin:end] = float("nan")
    ill = {"rows": run(ops, case, ill_x, ill_dy, rows)}
    case.factors.lora_a[case.layout.a_begin[1][0] : case.layout.a_begin[2][0]] = float("inf")
    for p, lora in enumerate(case.factors.lora_b):
        lora[case.layout.b_begin[1][p] : case.layout.b_begin[2][p]] = float("nan")
    ill["weights"] = run(ops, case, x, dy, rows)
    for what, found in ill.items():
        for name, value in clean.items():
            if name in ("y", "dx"):
                assert torch.equal(found[name][:begin], value[:begin]), (what, name)
                assert torch.equal(found[name][end:], value[end:]), (what, name)
                assert not torch.isfinite(found[name][begin:end]).all(), (what, name)
            elif "[1]" not in name[:5]:
                assert torch.equal(found[name], value), (what, name)


def _sum_of_products(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.add.reduce(a[:, :, None] * b[None], axis=1, dtype=dtype)


@interpreted
def test_gradients_are_bitwise_those_of_the_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # BLAS rounds a row by its place in a block; a tensor core does not.
    monkeypatch.setattr(np, "matmul", _sum_of_products)
    case, *_, own_x, own_dy = made("q k v", make_rows((0, 70, 0, 0)))
    ops = TritonOps(config=SMALL)
    found = []
    for segments in ((0, 70, 0, 0), (5, 70, 3, 9), (130, 70, 33, 1)):
        rows = make_rows(segments)
        x, dy = operands(case, rows.ends[-1])
        x[rows.ends[0] : rows.ends[1]], dy[rows.ends[0] : rows.ends[1]] = own_x, own_dy
        found.append(run(ops, case, x, dy, rows))
    for p in range(3):
        for name in (f"dA[1][{p}]", f"dB[1][{p}]"):
            assert torch.equal(found[0][name], found[1][name]), name
            assert torch.equal(found[0][name], found[2][name]), name


def test_blocks_follow_the_budget_of_rows() -> None:
    """Not the rows of the micro-batch: blocks decide orders of sums."""
    case = make_case([[16]], WHOLE, K, dtype=torch.float32)
    found = [
        TritonOps().bind(case.factors, make_rows((n,), budget=budget)).config
        for n, budget in ((100, 8192), (8000, 8192), (100, 2048))
    ]
    assert found[0] == found[1] != found[2]


@interpreted
def test_windows_of_rows_add_up() -> None:
    """Sequence parallelism: each rank holds some rows of x, and dS of all of them."""
    case, rows, x, dy = made("gate up", make_rows(WORKLOADS["ragged"], padding=2))
    ops = TritonOps(config=SMALL)
    whole = run(ops, case, x, dy, rows)
    bound = ops.bind(case.factors, rows)
    windows = ((0, 63), (63, 126))
    with poisoned_memory():
        s = bound.down(x)
        parts_of_s = [bound.down(x[begin:end], (begin, end)) for begin, end in windows]
    written = ~s.isnan()
    assert torch.equal(torch.stack(parts_of_s).sum(dim=0)[written], s[written])
    ds = bound.backward_up(dy, s)
    gradients(case.factors)
    for window in windows:
        bound.backward_down(x[window[0] : window[1]], dy, s, ds, window)
    parts = gradients(case.factors)
    for name in parts:
        if name.startswith("dA"):
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-4, msg=name)
