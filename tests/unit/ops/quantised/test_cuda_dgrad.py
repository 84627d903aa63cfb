"""The launch of the FP8 input gradient packs what the kernel's struct holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tlora_megatron.ops.lora import cuda_calls
from tlora_megatron.ops.lora.cuda_arguments import DgradArguments
from tlora_megatron.ops.lora.cuda_calls import Arenas, Dropout, RankForm, RankPart
from tlora_megatron.ops.quantised import cuda
from tlora_megatron.ops.quantised.rows import QuantRows
from tlora_megatron.ops.quantised.weight import QuantWeight

N, K = 32, 48
DY = QuantRows(torch.zeros(6, N, dtype=torch.uint8), torch.ones(6))
CODES = torch.zeros(N, K, dtype=torch.uint8)
DX = torch.empty(6, K, dtype=torch.bfloat16)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every launch's fields by name, nulls as 0."""
    found: list[dict[str, Any]] = []

    def launch(name: str, arguments: bytes, on: torch.Tensor) -> None:
        assert name == "fp8_dgrad"
        fields = DgradArguments.from_buffer_copy(arguments)
        gemm = fields.gemm
        named = {key: getattr(gemm, key) or 0 for key, *_ in gemm._fields_ if key != "factors"}
        named |= {"lora_a": gemm.factors.at[0] or 0, "row_scales": fields.row_scales}
        found.append(named | {"block_scales": fields.block_scales or 0})

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(cuda_calls, "device_index", lambda x: 3)
    monkeypatch.setattr(cuda_calls, "multiprocessors", lambda device: 133)
    return found


def expect(actual: dict[str, Any], **expected: Any) -> None:
    """Tensors stand for their addresses; fields that are not named are 0."""
    values = {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in expected.items()}
    sizes = {"rows": 6, "columns_out": K, "depth": N, "tile_columns": 256, "group": 8}
    assert actual == dict.fromkeys(actual, 0) | sizes | {"blocks": 132, "device": 3} | values


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_without_adapters(launched: list[dict[str, Any]], kind: str) -> None:
    scales = torch.ones(N) if kind == "channel" else torch.ones(1, 1)
    cuda.fp8_dgrad(DY, QuantWeight(CODES, scales), DX)
    given = {} if kind == "channel" else {"block_scales": scales}
    expect(launched[0], x=DY.codes_TK, weight=CODES, row_scales=DY.scales, out=DX, **given)


def test_with_adapters_and_dropout(launched: list[dict[str, Any]]) -> None:
    form = RankForm(chunk_rows=16, num_rows=6, row_width=64)
    flat, lora_a = torch.empty(form.numel), torch.empty(80, K)
    chunks, tiles, keys, slots = (torch.empty(n, dtype=torch.int32) for n in (1, 3, 6, 6))
    mask = Dropout(torch.empty(2), keys, slots, key=77, first_column=96)
    rank = RankPart(flat, form, Arenas((lora_a,), ()), 2, tiles, chunks, mask)
    cuda.fp8_dgrad(
        DY, QuantWeight(CODES, torch.ones(N)), DX, rank=rank, overlaps_previous_kernel=True
    )
    expect(
        launched[0], x=DY.codes_TK, weight=CODES, row_scales=DY.scales, out=DX, ext=flat,
        lora_a=lora_a, tile_chunks=tiles, chunk_rows=chunks, row_keys=keys, row_slots=slots,
        dropout=mask.probability, ext_rows=16, num_targets=2, dropout_key=77, first_column=96,
        overlaps_previous_kernel=1,
    )  # fmt: skip
