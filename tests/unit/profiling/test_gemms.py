"""The timing of frozen linears, on a CPU."""

from __future__ import annotations

import pytest
import torch

from tlora_megatron.profiling.ops import measure_fp8_gemm, measure_gemm
from tlora_megatron.profiling.timer import DeviceTimer

CPU = torch.device("cpu")


@pytest.mark.parametrize("measure", [measure_gemm, measure_fp8_gemm])
def test_a_point_for_each_number_of_rows(measure) -> None:  # type: ignore[no-untyped-def]
    points = list(measure(DeviceTimer(CPU), (48, 32), (8, 16), torch.float32))
    assert [(p.rows, p.columns, p.inner) for p in points] == [(8, 48, 32), (16, 48, 32)]
