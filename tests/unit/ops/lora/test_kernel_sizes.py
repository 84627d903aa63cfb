"""Linears that the CUDA kernels support, GEMM tiles, and block sizes of the Triton kernels."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.cuda_cases import FUSED_AND_Q, QKV, WHOLE
from tlora_megatron.ops.lora.cuda_arguments import gemm_tile, is_supported
from tlora_megatron.ops.lora.linear_ops import OutputColumns
from tlora_megatron.ops.lora.tiling import (
    BackwardUpConfig,
    DownConfig,
    KernelConfig,
    UpConfig,
    kernel_config,
)

H100_CLUSTERS = 66


@pytest.mark.parametrize(
    ("row_budget", "columns", "width"),
    [
        (8192, 4096, 256),
        (8192, 6144, 256),
        (8192, 28672, 256),
        (2048, 4096, 256),
        (4096, 2560, 128),
        (1024, 6144, 192),
        (1024, 14336, 128),
        (1024, 2560, 192),
        (2048, 2560, 192),
        (300, 4096, 128),
        (8192, 65536, 256),
    ],
)
def test_gemm_tile(row_budget: int, columns: int, width: int) -> None:
    assert gemm_tile(row_budget, columns, H100_CLUSTERS).columns == width


def test_a_gemm_never_has_more_column_tiles_than_the_kernel_counts() -> None:
    for columns in (*range(8, 65_536, 1000), 65_536):
        tile = gemm_tile(8192, columns, H100_CLUSTERS)
        assert -(-columns // tile.columns) <= 256


@pytest.mark.parametrize(
    ("columns", "sizes", "first_column", "supported"),
    [
        (QKV, (512, 136), 0, True),
        (WHOLE, (200, 136), 32, True),
        (FUSED_AND_Q, (512, 136), 0, True),
        (WHOLE, (200, 132), 0, False),
        (WHOLE, (204, 136), 0, False),
        (WHOLE, (200, 136), 16, False),
        ((replace(QKV[0], begin=32),), (512, 136), 0, False),
        ((replace(QKV[0], width=96),), (512, 136), 0, False),
        ((replace(QKV[0], stride=224),), (448, 136), 0, False),
        (QKV[:1] * 4, (512, 136), 0, True),
        (QKV[:1] * 5, (512, 136), 0, False),
        (WHOLE, (65536, 136), 0, True),
        (WHOLE, (65544, 136), 0, False),
        (WHOLE, (200, 65544), 0, False),
    ],
)
def test_is_supported(
    columns: tuple[OutputColumns, ...], sizes: tuple[int, int], first_column: int, supported: bool
) -> None:
    size_out, size_in = sizes
    factors = SimpleNamespace(
        columns=columns,
        size_in=size_in,
        size_out=size_out,
        first_column=first_column,
        is_aligned=True,
    )
    assert is_supported(factors) is supported
    factors.is_aligned = False
    assert not is_supported(factors)


def test_runs_of_many_rows_get_the_defaults() -> None:
    assert kernel_config(2049) == KernelConfig()


def test_runs_of_few_rows_have_more_warps_backward() -> None:
    few, many = kernel_config(2048), KernelConfig()
    assert few == kernel_config(1)
    assert few.backward_up.num_warps == few.backward_down.num_warps == 8
    assert (few.down, few.up) == (many.down, many.up)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"down": DownConfig(splits=0)}, r"down\.splits must be at least 1, got 0"),
        ({"down": DownConfig(block_rows=96)}, r"down\.block_rows must be a power of two, got 96"),
        ({"up": UpConfig(block_rows=512)}, r"up\.block_rows must divide 256, got 512"),
        (
            {"backward_up": BackwardUpConfig(split_columns=100)},
            r"backward_up\.split_columns must be a multiple of 128, got 100",
        ),
    ],
)
def test_invalid_blocks_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KernelConfig(**parts)
