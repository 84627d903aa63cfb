"""The FP8 products of Hopper's kernels: what launches pack, and who is asked for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.cuda_cases import STRUCTS
from tests.helpers.kernel_case import make_case, make_rows
from tlora_megatron.ops.lora import cuda_calls
from tlora_megatron.ops.lora.cuda_arguments import Arenas, GemmTile
from tlora_megatron.ops.lora.cuda_calls import Dropout, RankForm, RankPart
from tlora_megatron.ops.lora.cuda_ops import CudaOps
from tlora_megatron.ops.lora.linear_ops import OutputColumns
from tlora_megatron.ops.lora.torch_ops import TorchOps
from tlora_megatron.ops.quantised import cuda
from tlora_megatron.ops.quantised.rows import GROUP, encode_rows
from tlora_megatron.ops.quantised.weight import QuantWeight, encode_weight

T, N, K = 48, 272, 144
BLOCKS = QuantWeight(torch.zeros(N, K, dtype=torch.uint8), torch.ones(3, 2))
CHANNELS = encode_weight(torch.randn(N, K))
X = torch.randn(T, K)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The struct of every launch."""
    found: list[Any] = []

    class Library:
        def call(self, name: str, arguments: bytes, stream: int) -> None:
            found.append(STRUCTS[name].from_buffer_copy(arguments))

    monkeypatch.setattr(cuda_calls, "load_extension", Library)
    monkeypatch.setattr(cuda_calls, "device_index", lambda x: 3)
    for module in (cuda_calls, cuda):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 133)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 40 + i, raising=False)
    return found


@pytest.mark.parametrize("weight", [CHANNELS, BLOCKS], ids=["channel", "block"])
def test_forward(launched: list[Any], weight: QuantWeight) -> None:
    out, rows = X.new_empty(T, N), encode_rows(X, group=weight.group)
    cuda.fp8_gemm(rows, weight, out, GemmTile(256))
    (fields,) = launched
    gemm = fields.gemm
    assert (gemm.x, gemm.weight) == (rows.codes_TK.data_ptr(), weight.codes_NK.data_ptr())
    assert (gemm.rows, gemm.columns_out, gemm.depth, gemm.out) == (T, N, K, out.data_ptr())
    assert (gemm.tile_columns, gemm.blocks, gemm.overlaps_previous_kernel) == (256, 132, 0)
    assert (fields.row_scales, fields.scales) == (rows.scales.data_ptr(), weight.scales.data_ptr())
    assert fields.block == (weight is BLOCKS)


def test_a_product_of_no_rows_has_none(launched: list[Any]) -> None:
    assert cuda.product(X[:0], CHANNELS, None, None).shape == (0, N)


@pytest.mark.parametrize("is_handed", [True, False])
def test_a_product_overlaps_the_kernel_before_only_with_codes_that_are_older(
    launched: list[Any], is_handed: bool
) -> None:
    x = X.clone()
    if is_handed:
        CHANNELS.prepare(x)
    form = SimpleNamespace(chunk_rows=16)
    rank = RankPart(X, form, SimpleNamespace(argument=b""), 1, X, X, None)  # type: ignore[arg-type]
    cuda.product(x, CHANNELS, None, rank)
    assert launched[0].gemm.overlaps_previous_kernel == is_handed
    assert not x.__dict__, "codes must not outlive the product"


def test_a_linear_asks_a_base_that_takes_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arena of each direction; a base that refuses gets the sum to add to."""
    columns = (OutputColumns(groups=1, stride=64, begin=0, width=64),)
    case = make_case([[4], [8]], columns, 64, dtype=torch.float32)
    weight = encode_weight(case.weight_NK)
    assert not weight.takes_ranks(X), "there is no GPU here"
    rows = make_rows((5, 9))
    bound = CudaOps(TorchOps()).bind(case.factors, rows)
    asked: list[tuple[str, Any]] = []

    class Base:
        num_columns = 64

        def takes_ranks(self, x: torch.Tensor) -> bool:
            return True

        def prepare(self, x_TK: torch.Tensor) -> None:
            asked.append(("prepare", None))

        def ranked_product(self, x_TK: torch.Tensor, bias_N: Any, rank: Any) -> torch.Tensor:
            asked.append(("product", rank))
            return x_TK

        def ranked_dgrad(self, dy_TN: torch.Tensor, rank: Any) -> torch.Tensor:
            asked.append(("dgrad", rank))
            return dy_TN

        def forward(self, x_TK: torch.Tensor, onto_TN: Any) -> torch.Tensor:
            raise AssertionError("it takes ranks")

        dgrad = forward

    monkeypatch.setattr(type(bound), "down", lambda self, x: x)
    x = torch.randn(14, 64)
    _, s = bound.forward(x, Base(), None)
    bound.product_dgrad(x, s, Base())
    assert [name for name, _ in asked] == ["prepare", "product", "dgrad"]
    product, dgrad = asked[1][1], asked[2][1]
    assert product.factors.arenas == case.factors.lora_b
    assert dgrad.factors.arenas == (case.factors.lora_a,)


def test_only_bf16_of_whole_16s_on_our_gpus_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "runs_cuda", lambda x: True)
    on_gpu = SimpleNamespace(dtype=torch.bfloat16)
    assert cuda.takes(on_gpu, CHANNELS)  # type: ignore[arg-type]
    odd = encode_weight(torch.zeros(N, K + 8))
    assert not cuda.takes(on_gpu, odd)  # type: ignore[arg-type]
    on_gpu.dtype = torch.float16
    assert not cuda.takes(on_gpu, CHANNELS)  # type: ignore[arg-type]
    assert GROUP == 128, "kCodes of fp8_gemm.cuh"


DY = encode_rows(torch.randn(6, N))
DX = torch.empty(6, K, dtype=torch.bfloat16)


def expect_dgrad(actual: Any, **expected: Any) -> None:
    """Tensors stand for their addresses; fields that are not named are 0."""
    gemm = actual.gemm
    found = {key: getattr(gemm, key) or 0 for key, *_ in gemm._fields_ if key != "factors"}
    found |= {"lora_a": gemm.factors.at[0] or 0, "row_scales": actual.row_scales}
    found |= {"block_scales": actual.block_scales or 0}
    given = {"x": DY.codes_TK, "row_scales": DY.scales, "out": DX} | expected
    values = {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    sizes = {"rows": 6, "columns_out": K, "depth": N, "tile_columns": 256, "group": 8}
    assert found == dict.fromkeys(found, 0) | sizes | {"blocks": 132, "device": 3} | values


@pytest.mark.parametrize("weight", [CHANNELS, BLOCKS], ids=["channel", "block"])
def test_an_input_gradient_without_adapters(launched: list[Any], weight: QuantWeight) -> None:
    cuda.fp8_dgrad(DY, weight, DX)
    given = {} if weight is CHANNELS else {"block_scales": weight.scales}
    expect_dgrad(launched[0], weight=weight.codes_NK, **given)


def test_an_input_gradient_with_adapters_and_dropout(launched: list[Any]) -> None:
    form = RankForm(chunk_rows=16, num_rows=6, row_width=64)
    flat, lora_a = torch.empty(form.numel), torch.empty(80, K)
    chunks, tiles, keys, slots = (torch.empty(n, dtype=torch.int32) for n in (1, 3, 6, 6))
    mask = Dropout(torch.empty(2), keys, slots, key=77, first_column=96)
    rank = RankPart(flat, form, Arenas((lora_a,), ()), 2, tiles, chunks, mask)
    cuda.fp8_dgrad(DY, CHANNELS, DX, rank=rank, overlaps_previous_kernel=True)
    expect_dgrad(
        launched[0], weight=CHANNELS.codes_NK, ext=flat, lora_a=lora_a, tile_chunks=tiles,
        chunk_rows=chunks, row_keys=keys, row_slots=slots, dropout=mask.probability, ext_rows=16,
        num_targets=2, dropout_key=77, first_column=96, overlaps_previous_kernel=1,
    )  # fmt: skip
