"""rank_pair.cu on a GPU: dS and dB of one pass over dy, beside the two kernels and fp32 sums."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.kernel_case import (
    KernelCase,
    gradients,
    make_case,
    make_rows,
    poisoned_memory,
)
from tests.helpers.linear_case import error
from tlora_megatron.ops.lora.columns import OutputColumns
from tlora_megatron.ops.lora.cuda.pair_items import PairFit
from tlora_megatron.ops.lora.cuda.work_items import rows_per_run
from tlora_megatron.ops.lora.kernel_choice import problem_of
from tlora_megatron.ops.routing.row_groups import RowGroups

pytestmark = pytest.mark.gpu

K = 256
QKV = tuple(
    OutputColumns(groups=4, stride=768, begin=begin, width=width)
    for begin, width in ((0, 512), (512, 128), (640, 128))
)
ODD_END = (OutputColumns(groups=1, stride=1608, begin=0, width=1608),)
WIDE = (OutputColumns(groups=1, stride=7168, begin=0, width=7168),)
CASES = {
    "q k v": (QKV, [[8, 0, 17], [64, 16, 40], [0, 0, 0], [1, 33, 128]]),
    "a part of a panel at the end": (ODD_END, [[16], [48], [0], [72]]),
    "many ranges": (WIDE, [[4], [32], [16], [64]]),
}
LENGTHS = (777, 1300, 64, 2100)
FITS = [(2, 256), (2, 1024), (4, 512), (8, 2048)]


@pytest.fixture(autouse=True)
def _has_kernels() -> None:
    if problem := problem_of("cuda", torch.device("cuda"), torch.bfloat16):
        pytest.skip(problem)


def backward_up(
    case: KernelCase,
    rows: RowGroups,
    dy: torch.Tensor,
    s: torch.Tensor,
    fit: PairFit | None,
    times: int = 1,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """dS as rows and chunks, and dB by name, where memory comes poisoned."""
    from tlora_megatron.ops.lora.cuda import ops as cuda_ops
    from tlora_megatron.ops.lora.torch_ops import TorchOps

    patch = pytest.MonkeyPatch()
    patch.setattr(cuda_ops, "pair_fit", lambda *_: fit)
    try:
        bound = cuda_ops.CudaOps(TorchOps()).bind(case.factors, rows)
        gradients(case.factors)
        with poisoned_memory():
            for _ in range(times):
                ds = bound.backward_up(dy, s)
            if fit is None:
                bound.backward_down(torch.zeros_like(dy[:, :K]), dy, s, ds, (0, len(dy)))
    finally:
        patch.undo()
    found = gradients(case.factors)
    return ds, {name: grad for name, grad in found.items() if name[1] == "B"}


def draw(
    name: str, lengths: tuple[int, ...] = LENGTHS, padding: int = 55
) -> tuple[KernelCase, RowGroups, torch.Tensor, torch.Tensor]:
    """A case, its rows, dy and s."""
    from tlora_megatron.ops.lora.cuda.ops import CudaOps
    from tlora_megatron.ops.lora.torch_ops import TorchOps

    columns, ranks = CASES[name]
    case = make_case(ranks, columns, K, dtype=torch.bfloat16, device="cuda", dropout=(0.2,) * 4)
    rows = make_rows(lengths, padding)
    x = torch.randn(rows.ends[-1], K, device="cuda").bfloat16()
    dy = torch.randn(rows.ends[-1], case.out_size, device="cuda").bfloat16()
    return case, rows, dy, CudaOps(TorchOps()).bind(case.factors, rows).down(x)


def of_values(ds: torch.Tensor) -> torch.Tensor:
    return ds.nan_to_num(nan=-7.0)  # what nobody writes stays poisoned


@pytest.mark.parametrize("fit", FITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_two_kernels(name: str, fit: tuple[int, int]) -> None:
    case, rows, dy, s = draw(name)
    pair = PairFit(most_panels=fit[0], rows_per_run=fit[1])
    ds, db = backward_up(case, rows, dy, s, pair)
    other_ds, other_db = backward_up(case, rows, dy, s, None)
    assert torch.equal(ds.isnan(), other_ds.isnan()), "both must write the same places"
    assert error(of_values(ds), of_values(other_ds)) < 4e-3
    for key, value in other_db.items():
        assert error(db[key], value) < 1e-5, key


@pytest.mark.parametrize("panels", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_db_has_the_bits_of_runs_as_long(name: str, panels: int) -> None:
    case, rows, dy, s = draw(name)
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    as_long = rows_per_run(rows.row_budget, case.out_size, blocks)
    _, db = backward_up(case, rows, dy, s, PairFit(most_panels=panels, rows_per_run=as_long))
    _, other = backward_up(case, rows, dy, s, None)
    for key, value in other.items():
        assert torch.equal(db[key], value), key


@pytest.mark.parametrize("fit", FITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_launches_in_a_row_have_the_same_bits(name: str, fit: tuple[int, int]) -> None:
    case, rows, dy, s = draw(name)
    pair = PairFit(most_panels=fit[0], rows_per_run=fit[1])
    ds, db = backward_up(case, rows, dy, s, pair)
    for _ in range(10):
        again, grads = backward_up(case, rows, dy, s, pair)
        assert torch.equal(of_values(again), of_values(ds))
        for key, value in db.items():
            assert torch.equal(grads[key], value), key
    _, four = backward_up(case, rows, dy, s, pair, times=4)
    for key, value in db.items():
        torch.testing.assert_close(four[key], 4 * value, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", CASES)
def test_ds_of_a_row_is_the_same_at_any_place(name: str) -> None:
    """Rows of the second job behind other neighbours, full of NaN, in other steps and tiles."""
    from tlora_megatron.ops.lora.cuda.rank_form import rank_form
    from tlora_megatron.ops.lora.plan_tensors import plan_tensors

    case, rows, dy, s = draw(name)
    pair = PairFit(most_panels=2, rows_per_run=512)
    form = rank_form(plan_tensors(rows, case.layout, dy.device))
    own = slice(rows.ends[0], rows.ends[1])
    ds, _ = backward_up(case, rows, dy, s, pair)
    other_rows = make_rows((100, 1300, 901, 1940), 55)
    assert other_rows.ends[-1] == rows.ends[-1]
    other_form = rank_form(plan_tensors(other_rows, case.layout, dy.device))
    moved = torch.full_like(dy, float("nan"))
    place = slice(other_rows.ends[0], other_rows.ends[1])
    moved[place] = dy[own]
    other_s = torch.zeros(other_form.numel, device="cuda", dtype=torch.bfloat16)
    other_ds, db = backward_up(case, other_rows, moved, other_s, pair)
    width = sum(-(-r // 16) * 16 for r in case.layout.ranks[1])
    found, expected = other_form.rows(other_ds)[place], form.rows(ds)[own]
    assert torch.equal(found[:, :width], expected[:, :width])
    for key, value in db.items():
        if key.startswith("dB[1]"):
            assert torch.isfinite(value).all(), key
