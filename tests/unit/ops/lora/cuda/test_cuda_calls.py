"""Launches pack what the kernels' structs hold, field by field."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.cuda_cases import STRUCTS
from tlora_megatron.ops.lora import cuda_calls
from tlora_megatron.ops.lora.cuda_arguments import Arenas, Factors, GemmTile, packer
from tlora_megatron.ops.lora.cuda_calls import Dropout, RankForm, RankPart, SumOperands
from tlora_megatron.ops.lora.linear_ops import OutputColumns

X, W, OUT = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((6, 8), (16, 8), (6, 16)))
FORM = RankForm(chunk_rows=2, num_rows=6, row_width=64)
FLAT, OTHER_FLAT = (torch.empty(FORM.numel, dtype=torch.bfloat16) for _ in range(2))
ITEMS, CHUNKS, TILES = (torch.empty(n, dtype=torch.int32) for n in (60, 2, 4))
WORK = SimpleNamespace(
    items=ITEMS, count=3, partial_sums=torch.empty(7), counters=torch.empty(8, dtype=torch.int32),
    borders=torch.empty(9, dtype=torch.int32),
)  # fmt: skip
SCALING = torch.empty(2)
DROPOUT = Dropout(SCALING, torch.empty(6), torch.empty(6), key=77, first_column=8)
MASK = {"row_keys": DROPOUT.row_keys, "dropout": SCALING, "dropout_key": 77, "first_column": 8}
COLUMNS = OutputColumns(groups=2, stride=8, begin=0, width=4)
ARENAS = Arenas((torch.empty(5, 8), torch.empty(7, 8)), (COLUMNS, COLUMNS))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every launch's fields by name, nulls as 0."""
    found: list[dict[str, Any]] = []

    class Library:
        def call(self, name: str, arguments: bytes, stream: int) -> None:
            fields = STRUCTS[name].from_buffer_copy(arguments)
            named = {key: getattr(fields, key) or 0 for key, *_ in fields._fields_}
            found.append(named | {"kernel": name, "stream": stream})

    monkeypatch.setattr(cuda_calls, "load_extension", Library)
    monkeypatch.setattr(cuda_calls, "device_index", lambda x: 3)
    monkeypatch.setattr(cuda_calls, "multiprocessors", lambda device: 133)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 40 + i, raising=False)
    return found


def expect(actual: dict[str, Any], **expected: Any) -> None:
    """Tensors stand for their addresses; fields that are not named are 0."""
    factors = actual.pop("factors", None)
    if "factors" in expected:
        assert bytes(factors) == expected.pop("factors").argument
    values = {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in expected.items()}
    assert actual == dict.fromkeys(actual, 0) | values | {"device": 3, "stream": 43}


def test_arenas_hold_addresses_and_columns() -> None:
    held = Factors.from_buffer_copy(ARENAS.argument)
    first, second = ARENAS.arenas
    assert list(held.at)[:2] == [first.data_ptr(), second.data_ptr()]
    assert (list(held.rows)[:2], list(held.width)[:2]) == ([5, 7], [8, 8])
    column = held.columns[1]
    assert (column.groups, column.stride, column.begin, column.width) == (2, 8, 0, 4)


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["", "dropout"])
def test_gemm(launched: list[dict[str, Any]], dropout: Dropout | None) -> None:
    rank = RankPart(FLAT, FORM, ARENAS, 2, TILES, CHUNKS, dropout)
    tile, bias = GemmTile(192, 4), torch.empty(16)
    cuda_calls.gemm(
        X, W, OUT, tile, transposed=True, overlaps_previous_kernel=True, bias_N=bias, rank=rank
    )
    mask = MASK | {"row_slots": DROPOUT.row_slots} if dropout else {}
    expect(
        launched[0], kernel="gemm", x=X, weight=W, bias=bias, ext=FLAT, out=OUT, tile_chunks=TILES,
        chunk_rows=CHUNKS, rows=6, columns_out=16, depth=8, ext_rows=2, factors=ARENAS,
        num_targets=2, transposed=1, tile_columns=192, group=4, blocks=132,
        overlaps_previous_kernel=1, **mask,
    )  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["", "dropout"])
def test_rows(launched: list[dict[str, Any]], dropout: Dropout | None, masked: bool) -> None:
    cuda_calls.rank_rows(
        X, ARENAS, FLAT, FORM, WORK, chunks=CHUNKS, scaling=SCALING, parts=4, dropout=dropout,
        masked=masked,
    )  # fmt: skip
    mask = {} if dropout is None else MASK if masked else {"dropout": SCALING}
    expect(
        launched[0], kernel="rows", input=X, ext=FLAT, rows=FORM.rows_address(FLAT), items=ITEMS,
        chunks=CHUNKS, scaling=SCALING, num_rows=6, in_columns=8, factors=ARENAS, num_targets=2,
        num_items=3, item_fields=20, parts=4, row_width=64, **mask,
    )  # fmt: skip


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["", "dropout"])
def test_sums(launched: list[dict[str, Any]], dropout: Dropout | None) -> None:
    tables = SimpleNamespace(grad_a=torch.empty(5), grad_b=torch.empty(6))
    cuda_calls.rank_sums(
        SumOperands(X[2:], 2, FLAT, OUT, OTHER_FLAT), FORM, WORK, tables, blocks=9,
        overlaps_previous_kernel=True, dropout=dropout,
    )  # fmt: skip
    mask = MASK if dropout else {}
    expect(
        launched[0], kernel="sums", x=X[2:], ds=FORM.rows_address(FLAT), dy=OUT,
        s=FORM.rows_address(OTHER_FLAT), items=ITEMS, borders=WORK.borders, grad_a=tables.grad_a,
        grad_b=tables.grad_b, workspace=WORK.partial_sums, counters=WORK.counters, num_rows=6,
        x_rows=4, x_columns=8, dy_columns=16, num_items=3, item_fields=20, blocks=9, row_width=64,
        first_row=2, overlaps_previous_kernel=1, **mask,
    )  # fmt: skip


def test_a_struct_with_gaps_is_packed_with_them() -> None:
    class Gaps(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_int64), ("c", ctypes.c_int)]

    packed = Gaps.from_buffer_copy(packer(Gaps).pack(1, 2, 3))
    assert (packed.a, packed.b, packed.c) == (1, 2, 3)
