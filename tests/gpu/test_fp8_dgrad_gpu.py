"""The input gradient of FP8 weights by CUDA (csrc/fp8_dgrad.cuh), against the definition."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from tests.gpu.test_kernels_gpu import (
    CASES,
    DROPOUT,
    WORKLOADS,
    K,
    case_of_1024_adapters,
    draw,
    mask_case,
)
from tests.helpers.kernel_case import KernelCase, make_case, make_rows, poisoned_memory, reference
from tests.helpers.linear_case import error
from tlora_megatron.ops.lora.cuda_calls import RankPart
from tlora_megatron.ops.quantised.cuda import dgrad_with_ranks, fp8_dgrad
from tlora_megatron.ops.quantised.rows import GROUP, QuantRows, decode, encode, encode_rows
from tlora_megatron.ops.quantised.weight import QuantWeight, encode_weight, input_gradient
from tlora_megatron.ops.quantised.weight_codes import Kind
from tlora_megatron.ops.row_groups import RowGroups

if TYPE_CHECKING:
    from tlora_megatron.ops.lora.cuda_ops import CudaLinear

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

ROUNDED = 3e-3
"""Share of a row's norm: bf16 rounds to 2^-9, 1.1e-3 on average; sums of FP8 products add 1e-4."""
WITH_RANKS = 1.2e-2
ONE = 0x38
GUARD = 8
KINDS: tuple[Kind, ...] = ("channel", "block")
SUPPORTED = [name for name in CASES if name != "odd columns"]


def dgrad(rows: QuantRows, weight: QuantWeight, rank: RankPart | None = None) -> Tensor:
    """The kernel's result; writes beyond it and elements not written fail."""
    num_rows, size = len(rows.codes_TK), weight.shape[1]
    memory = torch.full((num_rows + GUARD, size), torch.nan, dtype=torch.bfloat16, device="cuda")
    fp8_dgrad(rows, weight, memory[:num_rows], rank=rank)
    torch.cuda.synchronize()
    assert memory[num_rows:].isnan().all(), "rows behind the last must not be written"
    return memory[:num_rows]


def definition(rows: QuantRows, weight: QuantWeight) -> Tensor:
    return input_gradient(rows, weight.codes_NK, weight.scales, torch.float64)


def draw_weight(n: int, k: int, kind: Kind, seed: int = 0) -> QuantWeight:
    generator = torch.Generator("cuda").manual_seed(seed)
    w_NK = torch.randn(n, k, generator=generator, device="cuda") * k**-0.5
    if kind == "channel":
        return encode_weight(w_NK)
    blocks = (-(-n // GROUP), -(-k // GROUP))
    scales = torch.rand(blocks, generator=generator, device="cuda") * 0.01 + 1e-3
    wide = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[:n, :k]
    return QuantWeight(encode((w_NK / wide).clamp(-448, 448)), scales)


def draw_rows(t: int, weight: QuantWeight, seed: int = 1) -> QuantRows:
    generator = torch.Generator("cuda").manual_seed(seed)
    dy_TN = torch.randn(t, weight.num_columns, generator=generator, device="cuda")
    spread = 10 ** torch.empty(t, 1, device="cuda").uniform_(-3, 3, generator=generator)
    return encode_rows((dy_TN * spread).bfloat16(), fold_K=weight.fold_N)


def places_of_errors(wrong_TK: Tensor) -> str:
    """Returns the bits of rows' and features' indices that wrong elements share, and the first."""
    lines = [f"{int(wrong_TK.sum())} of {wrong_TK.numel()} elements are wrong"]
    for name, dim in (("row", 0), ("feature", 1)):
        index = torch.arange(wrong_TK.shape[dim], device=wrong_TK.device)
        share = wrong_TK.float().mean(dim=1 - dim)
        for bit in range(max(1, (len(index) - 1).bit_length())):
            on = (index >> bit & 1).bool()
            parts = [float(share[m].mean()) if m.any() else 0.0 for m in (~on, on)]
            lines.append(
                f"{name} bit {bit}: {parts[0]:6.1%} wrong where 0, {parts[1]:6.1%} where 1"
            )
    lines.append(f"first (row, feature): {wrong_TK.nonzero()[:12].tolist()}")
    return "\n".join(lines)


def assert_close(actual_TK: Tensor, expected_TK: Tensor, tolerance: float = ROUNDED) -> None:
    """Every row within a tolerance of its norm."""
    assert torch.isfinite(actual_TK).all(), places_of_errors(~torch.isfinite(actual_TK))
    difference = actual_TK.double() - expected_TK
    norm_T = expected_TK.norm(dim=1).clamp(min=1e-30)
    error_T = difference.norm(dim=1) / norm_T
    limit_TK = 8 * tolerance * (norm_T / expected_TK.shape[1] ** 0.5)[:, None]
    assert (error_T < tolerance).all(), (
        f"worst row {int(error_T.argmax())}: {float(error_T.max()):.2e}, median "
        f"{float(error_T.median()):.2e}\n{places_of_errors(difference.abs() > limit_TK)}\n"
        f"actual {actual_TK[:4, :8].tolist()}\nexpected {expected_TK[:4, :8].tolist()}"
    )


def what_each_read(codes: Tensor, of: str) -> str:
    """A map of the first rows: the n or k that the kernel read, for each feature."""
    return f"{of} that rows 0-3, 8 and 64 read, by feature:\n" + "\n".join(
        f"  row {t}: {codes[t, :80].tolist()}" for t in (0, 1, 2, 3, 8, 64)
    )


@pytest.mark.parametrize("of", ["n", "feature"])
def test_every_row_reads_its_n_and_every_feature_is_in_its_place(of: str) -> None:
    """Codes of W tell where they stand; rows of dy are one-hot, so dx is what they read."""
    n = k = 128
    numbers = torch.tensor([*range(1, 127), *range(129, 255)], dtype=torch.uint8, device="cuda")
    index = torch.arange(128, device="cuda")
    names_NK = numbers[index[:, None] if of == "n" else index[None, :]].expand(n, k).contiguous()
    rows = QuantRows(
        torch.eye(128, device="cuda", dtype=torch.uint8).repeat(2, 1).mul_(ONE),
        torch.ones(256, device="cuda"),
    )
    dx_TK = dgrad(rows, QuantWeight(names_NK, torch.ones(n, device="cuda")))
    values = decode(numbers, torch.bfloat16)
    found_TK = (dx_TK[:, :, None] == values[:128]).to(torch.uint8).argmax(dim=2)
    known_TK = (dx_TK[:, :, None] == values[:128]).any(dim=2)
    expected_TK = (index.repeat(2)[:, None] if of == "n" else index[None, :]).expand(256, k)
    wrong_TK = ~known_TK | (found_TK != expected_TK)
    shown = torch.where(known_TK, found_TK, -1)
    assert not wrong_TK.any(), f"{what_each_read(shown, of)}\n{places_of_errors(wrong_TK)}"


SHAPES = [(1, 16, 16), (63, 144, 272), (257, 4096, 528), (300, 1040, 128), (130, 28672, 256)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (2048, 1024, 8192)], ids=str)
def test_base_alone(shape: tuple[int, int, int], kind: Kind) -> None:
    t, n, k = shape
    weight = draw_weight(n, k, kind)
    rows = draw_rows(t, weight)
    assert_close(dgrad(rows, weight), definition(rows, weight))


def test_long_sums_of_one_sign_are_promoted() -> None:
    """Unpromoted FP8 sums lose a bit more than they keep: a mean error of one sign of 1e-2."""
    weight = draw_weight(14336, 256, "channel")
    weight = replace(weight, codes_NK=weight.codes_NK & 0x7F)
    rows = draw_rows(256, weight)
    rows = replace(rows, codes_TK=rows.codes_TK & 0x7F)
    expected = definition(rows, weight)
    bias = float(((dgrad(rows, weight).double() - expected) / expected).mean())
    print(f"\nmean relative error of sums of one sign over 14,336: {bias:.1e}")
    assert abs(bias) < 1e-3


def bind(case: KernelCase, rows: RowGroups) -> CudaLinear:
    from tlora_megatron.ops.lora.cuda_ops import CudaLinear, CudaOps
    from tlora_megatron.ops.lora.triton_ops import TritonOps

    bound = CudaOps(TritonOps()).bind(case.factors, rows)
    assert isinstance(bound, CudaLinear)
    return bound


def ranks_of(bound: CudaLinear, ds: Tensor) -> RankPart | None:
    return bound._rank_part(ds, bound._site.a, "chunk_a", bound._dgrad_dropout)


def case_of(linear: str, dropout: Sequence[float] = ()) -> KernelCase:
    columns, ranks = CASES[linear]
    return make_case(ranks, columns, K, dtype=torch.bfloat16, device="cuda", dropout=dropout)


def quantised(case: KernelCase, kind: Kind) -> QuantWeight:
    if kind == "channel":
        return encode_weight(case.weight_NK)
    return draw_weight(*case.weight_NK.shape, kind)


def linear_dgrad(
    case: KernelCase, weight: QuantWeight, x: Tensor, dy: Tensor, rows: RowGroups
) -> Tensor:
    bound = bind(case, rows)
    ds = bound.backward_up(dy, bound.down(x))
    return dgrad_with_ranks(dy, weight, ranks_of(bound, ds))


def expected_dgrad(
    case: KernelCase, weight: QuantWeight, x: Tensor, dy: Tensor, rows: RowGroups
) -> Tensor:
    """The base by the definition, and the adapters' part in fp64."""
    without_base = replace(case, weight_NK=torch.zeros_like(case.weight_NK))
    ranks_TK = reference(without_base, x, dy, rows)["dx"]
    return definition(encode_rows(dy, fold_K=weight.fold_N), weight) + ranks_TK


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [(), DROPOUT], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("linear", SUPPORTED)
def test_with_adapters(linear: str, workload: str, dropout: tuple[float, ...], kind: Kind) -> None:
    case = case_of(linear, dropout)
    rows = make_rows(WORKLOADS[workload], padding=6)
    x, dy = draw(case, rows.ends[-1])
    weight = quantised(case, kind)
    with poisoned_memory():
        dx_TK = linear_dgrad(case, weight, x, dy, rows)
    expected_TK = expected_dgrad(case, weight, x, dy, rows)
    if not torch.isfinite(dx_TK).all() or error(dx_TK, expected_TK) >= WITH_RANKS:
        assert_close(dx_TK, expected_TK, WITH_RANKS)
        pytest.fail(f"error {error(dx_TK, expected_TK):.2e}")


def test_the_mask_is_that_of_the_definition() -> None:
    case, rows, ones, keep = mask_case(torch.bfloat16)
    zeros = torch.zeros(256, 256, device="cuda", dtype=torch.uint8)
    nothing = QuantWeight(zeros, torch.ones(256, device="cuda"))
    bound = bind(case, rows)
    ds = torch.ones_like(bound.down(ones))
    dx_TK = dgrad_with_ranks(torch.zeros_like(ones), nothing, ranks_of(bound, ds))
    tile = slice(512, 768)  # of one slot only: all of dS is 1 there
    wrong_TK = (dx_TK[tile] != 0) != keep[tile]
    assert not wrong_TK.any(), places_of_errors(wrong_TK)


def test_1024_adapters() -> None:
    case, rows = case_of_1024_adapters()
    x, dy = draw(case, rows.ends[-1])
    weight = quantised(case, "channel")
    dx_TK = linear_dgrad(case, weight, x, dy, rows)
    assert error(dx_TK, expected_dgrad(case, weight, x, dy, rows)) < WITH_RANKS


@pytest.mark.parametrize("dropout", [(), DROPOUT], ids=["no dropout", "dropout"])
def test_runs_are_bitwise_equal(dropout: tuple[float, ...]) -> None:
    case = case_of("q k v", dropout)
    rows = make_rows((900, 2000, 1, 2500))
    x, dy = draw(case, rows.ends[-1])
    weight = quantised(case, "block")
    first, *others = (linear_dgrad(case, weight, x, dy, rows) for _ in range(6))
    assert all(torch.equal(first, other) for other in others)
    for kind in KINDS:
        weight = draw_weight(6144, 4096, kind)
        large = draw_rows(8192, weight)
        first, *others = (dgrad(large, weight) for _ in range(4))
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("slot", [1, 2], ids=["a job", "a job without an adapter here"])
@pytest.mark.parametrize("dropout", [(), DROPOUT], ids=["no dropout", "dropout"])
def test_a_job_gets_the_same_bits_in_any_company(dropout: tuple[float, ...], slot: int) -> None:
    """Among others, alone, in a fuller micro-batch, and beside rows of NaN and of 1e30."""
    case = case_of("q k v", dropout)
    own_x, own_dy = draw(case, 1300, seed=1)
    weight = quantised(case, "channel")
    found = []
    strange = (None, torch.nan, 1e30)
    companies = [(5, 700, 333), (711, 3, 600), (0, 0, 0)]
    for others, value in itertools.product(companies, strange):
        lengths = (*others[:slot], 1300, *others[slot:])
        rows = make_rows(lengths, padding=4000 - sum(lengths), budget=16384)
        x, dy = draw(case, 4000)
        own = slice(rows.ends[slot - 1], rows.ends[slot])
        if value is not None:
            dy.fill_(value)
        x[own], dy[own] = own_x, own_dy
        found.append(linear_dgrad(case, weight, x, dy, rows)[own])
    for i, other in enumerate(found):
        assert torch.equal(found[0], other), (i, places_of_errors(found[0] != other))
