"""The GEMM of FP8 codes with adapters in it, and the input gradient, against their definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.gpu.test_kernels_gpu import CASES, DROPOUT, WHOLE, WORKLOADS, mask_case
from tests.helpers.kernel_case import (
    KernelCase,
    compare,
    gradients,
    make_case,
    make_rows,
    operands,
    poisoned_memory,
    reference,
)
from tlora_megatron.ops.lora.cuda_arguments import GemmTile
from tlora_megatron.ops.lora.linear_ops import BoundLinear, LinearOps
from tlora_megatron.ops.quantised import cuda
from tlora_megatron.ops.quantised.rows import GROUP, QuantRows, decode, encode, encode_rows
from tlora_megatron.ops.quantised.weight import (
    QuantWeight,
    encode_weight,
    forward_product,
    input_gradient,
)
from tlora_megatron.ops.quantised.weight_codes import Kind
from tlora_megatron.ops.routing import RowGroups

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

BF16 = torch.bfloat16
MOST = 2**-8 + 6e-4
"""Share of a row's norm: bf16 rounding may change a value by 2^-8 of it (1.7e-3 of the norm where
values lie anywhere between powers of 2, more in short rows), and 6e-4 is what sums of 128 products
lose at worst, where all have one sign (measured at K = 14,336)."""
WITH_RANKS = 1.2e-2
"""The bound of the bf16 kernels' tests: s and dS are rounded to bf16."""
LINEARS = {name: case for name, case in CASES.items() if name != "odd columns"}
SIZES = ((256, 768, 512), (300, 520, 400), (1, 16, 16), (4097, 1096, 1040), (129, 136, 2064))
"""Rows, columns, terms of the sum: whole tiles, and tails of 16 terms and 8 columns."""


KINDS = ("channel 128", "channel 192", "channel 256", "block 128", "block 256")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """The kind of scales; every GEMM has tiles of so many columns."""
    kind, columns = request.param.split(" ")
    monkeypatch.setattr(cuda, "tile_of", lambda *_: GemmTile(int(columns)))
    return "block" if kind == "block" else "channel"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


def quantised(w_NK: torch.Tensor, kind: Kind) -> QuantWeight:
    """A weight of channels' scales, or of blocks' scales of very different sizes."""
    if kind == "channel":
        return encode_weight(w_NK)
    blocks = [-(-size // GROUP) for size in w_NK.shape]
    scales = draw(*blocks, seed=9).exp() * 0.01
    wide = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    n, k = w_NK.shape
    return QuantWeight(encode(w_NK / wide[:n, :k] * 0.01), scales)


def row_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst row's error over its norm."""
    difference = (actual.double() - expected.double()).norm(dim=1)
    return float((difference / expected.double().norm(dim=1).clamp(min=1e-30)).max())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_without_adapters(sizes: tuple[int, int, int], kind: Kind) -> None:
    num_rows, n, k = sizes
    weight = quantised(draw(n, k, seed=1), kind)
    x, bias = draw(num_rows, k, seed=2).to(BF16), draw(n, seed=4).to(BF16)
    expected = forward_product(weight.rows_of(x), weight.codes_NK, weight.scales, BF16)
    with poisoned_memory():
        y = cuda.product(x, weight, None, None)
        with_bias = cuda.product(x, weight, bias, None)
    assert row_error(y, expected) < MOST
    assert row_error(with_bias, expected + bias) < MOST


def run(
    bound: BoundLinear, case: KernelCase, weight: QuantWeight, x: torch.Tensor, dy: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output and every gradient by name."""
    y, s = bound.forward(x, weight, case.bias_N)
    ds = bound.backward_up(dy, s)
    dx = bound.product_dgrad(dy, ds, weight)
    bound.backward_down(x, dy, s, ds, (0, len(x)))
    return {"y": y, "dx": dx, **gradients(case.factors)}


def expected_of(
    case: KernelCase, weight: QuantWeight, x: torch.Tensor, dy: torch.Tensor, rows: RowGroups
) -> dict[str, torch.Tensor]:
    """The rank part in fp64 beside the base's definition."""
    no_base = replace(case, weight_NK=torch.zeros_like(case.weight_NK))
    found = reference(no_base, x, dy, rows)
    codes, scales = weight.codes_NK, weight.scales
    found["y"] = found["y"] + forward_product(weight.rows_of(x), codes, scales, BF16)
    gradient = input_gradient(weight.gradient_rows_of(dy), codes, scales, BF16)
    found["dx"] = found["dx"] + gradient
    return found


def check(case: KernelCase, weight: QuantWeight, rows: RowGroups) -> None:
    x, dy = operands(case, rows.ends[-1])
    with poisoned_memory():
        actual = run(cuda_ops().bind(case.factors, rows), case, weight, x, dy)
    compare(actual, expected_of(case, weight, x, dy, rows), WITH_RANKS)


def cuda_ops() -> LinearOps:
    from tlora_megatron.ops.lora.cuda_ops import CudaOps
    from tlora_megatron.ops.lora.triton_ops import TritonOps

    return CudaOps(TritonOps())


def fp8_case(
    linear: str, dropout: Sequence[float] = (), in_size: int = 528, kind: Kind = "channel"
) -> tuple[KernelCase, QuantWeight]:
    columns, ranks = LINEARS[linear]
    case = make_case(ranks, columns, in_size, dtype=BF16, device="cuda", dropout=dropout)
    return case, quantised(case.weight_NK.float(), kind)


@pytest.mark.parametrize("dropout", [(), DROPOUT], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("linear", LINEARS)
def test_every_output_and_gradient_equals_the_definition(
    linear: str, workload: str, dropout: tuple[float, ...], kind: Kind
) -> None:
    case, weight = fp8_case(linear, dropout, kind=kind)
    check(case, weight, make_rows(WORKLOADS[workload], padding=6))


@pytest.mark.parametrize("num_adapters", [1, 64, 1024])
def test_any_number_of_adapters(num_adapters: int) -> None:
    lengths = [3 + i % 11 for i in range(num_adapters)]
    ranks = [[1 + i * 37 % 128] for i in range(num_adapters)]
    case = make_case(ranks, WHOLE, 528, dtype=BF16, device="cuda")
    check(case, encode_weight(case.weight_NK), make_rows(lengths, padding=9))


@pytest.mark.parametrize("dropout", [(), DROPOUT], ids=["no dropout", "dropout"])
@pytest.mark.parametrize(("linear", "slot"), [("large ranks", 1), ("q k v", 2)])
def test_bits_are_those_of_the_job_in_other_company_whatever_the_tiles(
    linear: str, slot: int, dropout: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job and of one without adapters here: alone, and beside others, NaN and loud ones."""
    case, weight = fp8_case(linear, dropout, in_size=1040)
    own_x, own_dy = operands(case, 1300, seed=1)
    found = []
    companies = ((5, 700, 333), (711, 3, 600), (0, 0, 0), (711, 3, 600))
    for number, others in enumerate(companies):
        columns = (128, 192, 256, 256)[number]
        monkeypatch.setattr(cuda, "tile_of", lambda *_, c=columns: GemmTile(c))
        lengths = (*others[:slot], 1300, *others[slot:])
        rows = make_rows(lengths, padding=4000 - sum(lengths))
        x, dy = operands(case, 4000, seed=20 + number)
        own = slice(rows.ends[slot - 1], rows.ends[slot])
        if number == 3:
            x[: own.start] = dy[: own.start] = float("nan")
            x[own.stop :] = dy[own.stop :] = 1e30
        x[own], dy[own] = own_x, own_dy
        actual = run(cuda_ops().bind(case.factors, rows), case, weight, x, dy)
        kept = {n: v for n, v in actual.items() if n[2:].startswith(f"[{slot}]")}
        found.append(kept | {n: actual[n][own] for n in ("y", "dx")})
        if number == 3:
            assert actual["y"][: own.start].isnan().all()
            assert actual["dx"][: own.start].isnan().all()
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(value, other[name]), name


def test_two_runs_are_bitwise_equal(kind: Kind) -> None:
    case, weight = fp8_case("q k v", DROPOUT, kind=kind)
    rows = make_rows((900, 2000, 1, 2500))
    x, dy = operands(case, rows.ends[-1])
    bound = cuda_ops().bind(case.factors, rows)
    first = run(bound, case, weight, x, dy)
    for _ in range(5):
        for name, value in run(bound, case, weight, x, dy).items():
            assert torch.equal(first[name], value), name


def test_long_sums_of_equal_signs_do_not_lose_what_tensor_cores_cut_off() -> None:
    """Over so many products unbroken they lose 21 %; of 128 at a time, measured, 6.0e-4."""
    k = 14_336
    rows = encode_rows(draw(256, k).abs().to(BF16))
    weight = encode_weight(draw(256, k, seed=1).abs())
    expected = forward_product(rows, weight.codes_NK, weight.scales, BF16).double()
    error = (gemm(rows, weight, 256).double() - expected) / expected
    assert abs(float(error.mean())) < 1e-3


def gemm(rows: QuantRows, weight: QuantWeight, width: int) -> torch.Tensor:
    out = torch.full((len(rows.codes_TK), weight.num_columns), torch.nan, device="cuda", dtype=BF16)
    cuda.fp8_gemm(rows, weight, out, GemmTile(width))
    return out


@pytest.mark.parametrize("num_rows", [1, 300, 8192])
@pytest.mark.parametrize("k", [16, 272, 2048])
@pytest.mark.parametrize("kind_of_scales", ["channel", "block"])
def test_the_width_of_tiles_changes_no_bit(kind_of_scales: Kind, k: int, num_rows: int) -> None:
    weight = quantised(draw(1096, k, seed=1), kind_of_scales)
    rows = encode_rows(draw(num_rows, k).to(BF16), group=weight.group)
    found = gemm(rows, weight, 256)
    expected = forward_product(rows, weight.codes_NK, weight.scales, BF16)
    assert row_error(found, expected) < MOST
    for width in (128, 192) if kind_of_scales == "channel" else (128,):
        assert torch.equal(gemm(rows, weight, width), found), width


def test_codes_handed_with_a_tensor_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward quantises before s is made, once; what it makes does not stay on the tensor."""
    case, weight = fp8_case("whole")
    rows = make_rows(WORKLOADS["ragged"])
    x, dy = operands(case, rows.ends[-1])
    bound = cuda_ops().bind(case.factors, rows)
    expected = run(bound, case, weight, x, dy)
    calls: list[QuantRows] = []

    def counted(x: torch.Tensor, **options: object) -> QuantRows:
        calls.append(encode_rows(x, **options))  # type: ignore[arg-type]
        return calls[-1]

    monkeypatch.setattr("tlora_megatron.ops.quantised.weight_codes.encode_rows", counted)
    y, _ = bound.forward(x, weight, case.bias_N)
    assert torch.equal(y, expected["y"])
    assert len(calls) == 1
    assert "tlora_quant_rows" not in x.__dict__


GUARD = 8
ROUNDED = 3e-3
"""Share of a row's norm: bf16 rounds to 2^-9, 1.1e-3 on average; sums of FP8 products add 1e-4."""
SCALES: tuple[Kind, ...] = ("channel", "block")


def dgrad(rows: QuantRows, weight: QuantWeight) -> torch.Tensor:
    """The kernel's result without adapters; writes beyond it and elements not written fail."""
    num_rows, size = len(rows.codes_TK), weight.shape[1]
    memory = torch.full((num_rows + GUARD, size), torch.nan, dtype=BF16, device="cuda")
    cuda.fp8_dgrad(rows, weight, memory[:num_rows])
    assert memory[num_rows:].isnan().all(), "rows behind the last must not be written"
    return memory[:num_rows]


@pytest.mark.parametrize("of", ["n", "feature"])
def test_every_row_reads_its_n_and_every_feature_is_in_its_place(of: str) -> None:
    """Codes of W tell where they stand; rows of dy are one-hot, so dx is what they read."""
    index = torch.arange(128, device="cuda")
    numbers = torch.tensor([*range(1, 127), 129, 130], dtype=torch.uint8, device="cuda")
    names_NK = numbers[index[:, None] if of == "n" else index[None, :]].expand(128, 128)
    one_hot = encode(torch.eye(128, device="cuda")).repeat(2, 1)
    weight = QuantWeight(names_NK.contiguous(), torch.ones(128, device="cuda"))
    dx_TK = dgrad(QuantRows(one_hot, torch.ones(256, device="cuda")), weight)
    assert torch.equal(dx_TK, decode(names_NK, BF16).repeat(2, 1))


SHAPES = [(1, 16, 16), (63, 144, 272), (257, 4096, 528), (300, 1040, 128), (130, 28672, 256)]


def far_apart(num_rows: int, weight: QuantWeight) -> QuantRows:
    """Codes of gradients' rows whose sizes are up to a million apart."""
    spread = 10 ** draw(num_rows, 1, seed=2).clamp(-3, 3)
    return weight.gradient_rows_of((draw(num_rows, weight.num_columns, seed=1) * spread).to(BF16))


@pytest.mark.parametrize("kind_of_scales", SCALES)
@pytest.mark.parametrize("shape", [*SHAPES, (2048, 1024, 8192)], ids=str)
def test_input_gradient_without_adapters(shape: tuple[int, int, int], kind_of_scales: Kind) -> None:
    num_rows, n, k = shape
    weight = quantised(draw(n, k), kind_of_scales)
    rows = far_apart(num_rows, weight)
    expected = input_gradient(rows, weight.codes_NK, weight.scales, torch.float64)
    assert row_error(dgrad(rows, weight), expected) < ROUNDED


def test_long_sums_of_one_sign_are_promoted() -> None:
    """Unpromoted FP8 sums lose a bit more than they keep: a mean error of one sign of 1e-2."""
    weight = encode_weight(draw(14336, 256).abs())
    rows = weight.gradient_rows_of(draw(256, 14336, seed=1).abs().to(BF16))
    expected = input_gradient(rows, weight.codes_NK, weight.scales, torch.float64)
    assert abs(float(((dgrad(rows, weight).double() - expected) / expected).mean())) < 1e-3


@pytest.mark.parametrize("kind_of_scales", SCALES)
def test_large_input_gradients_are_bitwise_equal(kind_of_scales: Kind) -> None:
    weight = quantised(draw(6144, 4096), kind_of_scales)
    rows = far_apart(8192, weight)
    first, *others = (dgrad(rows, weight) for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


def test_the_mask_of_the_input_gradient_is_that_of_the_definition() -> None:
    case, rows, ones, keep = mask_case(BF16)
    zeros = torch.zeros(256, 256, device="cuda", dtype=torch.uint8)
    nothing = QuantWeight(zeros, torch.ones(256, device="cuda"))
    bound = cuda_ops().bind(case.factors, rows)
    ds = torch.ones_like(bound.down(ones))
    dx_TK = bound.product_dgrad(torch.zeros_like(ones), ds, nothing)
    tile = slice(512, 768)  # of one slot only: all of dS is 1 there
    assert torch.equal(dx_TK[tile] != 0, keep[tile])
