"""Block sizes of the Triton kernels: invalid ones are refused, the rest follows the run's rows."""

from __future__ import annotations

from typing import Any

import pytest

from tlora_megatron.ops.lora.tiling import (
    BackwardUpConfig,
    DownConfig,
    KernelConfig,
    UpConfig,
    kernel_config,
)


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
