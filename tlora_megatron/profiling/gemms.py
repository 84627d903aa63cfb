"""Measures frozen linears by shape and rows: plain GEMMs, and FP8 with what it quantises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from tlora_megatron.ops.quantised.weight import encode_weight
from tlora_megatron.planner.hardware import GemmPoint
from tlora_megatron.profiling.timer import DeviceTimer

_MOST_SETS = 4
_FIRST_WITH_FP8 = (8, 9)
"""Compute capability of Ada, the first with FP8 products."""


def measure_gemm(
    timer: DeviceTimer, shape: tuple[int, int], rows: Sequence[int], dtype: torch.dtype
) -> Iterator[GemmPoint]:
    """Rates of one linear at several row counts, measured in turn on rotated weights."""
    weights = _weights(timer.device, shape, dtype)
    x, dy = _operands(timer.device, shape, max(rows), dtype)
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    turn = itertools.cycle(weights)

    def forward(height: int) -> None:
        torch.mm(x[:height], next(turn).t(), out=y[:height])

    def backward(height: int) -> None:
        torch.mm(dy[:height], next(turn), out=dx[:height])

    yield from _points(timer, shape, rows, forward, backward)


def measure_fp8_gemm(
    timer: DeviceTimer, shape: tuple[int, int], rows: Sequence[int], dtype: torch.dtype
) -> Iterator[GemmPoint]:
    """The same of a frozen FP8 linear, which quantises its activations and gradients."""
    weights = [encode_weight(weight) for weight in _weights(timer.device, shape, dtype)]
    x, dy = _operands(timer.device, shape, max(rows), dtype)
    turn = itertools.cycle(weights)

    def forward(height: int) -> None:
        next(turn).forward(x[:height])

    def backward(height: int) -> None:
        next(turn).dgrad(dy[:height])

    yield from _points(timer, shape, rows, forward, backward)


def multiplies_fp8(device: torch.device) -> bool:
    """True on a GPU with FP8 products."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


def _points(
    timer: DeviceTimer,
    shape: tuple[int, int],
    rows: Sequence[int],
    forward: Callable[[int], None],
    backward: Callable[[int], None],
) -> Iterator[GemmPoint]:
    columns, inner = shape
    calls = [partial(run, height) for height in rows for run in (forward, backward)]
    times = timer.medians(calls, seconds=0.35)
    for height, (there, back) in zip(rows, zip(times[::2], times[1::2], strict=True), strict=True):
        flops = 2.0 * height * columns * inner
        yield GemmPoint(
            rows=height,
            columns=columns,
            inner=inner,
            forward_flops_per_s=flops / there,
            backward_flops_per_s=flops / back,
        )


def _weights(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Random weights, so many that none is still in the cache at its next turn."""
    count = 1
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        count = min(_MOST_SETS, 1 + math.ceil(2 * cache / (2 * math.prod(shape))))
    drawn = (torch.randn(shape, device=device, dtype=dtype) for _ in range(count))
    return [weight.mul_(shape[1] ** -0.5) for weight in drawn]


def _operands(
    device: torch.device, shape: tuple[int, int], rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Random x `[rows, K]` and dy `[rows, N]`."""
    columns, inner = shape
    x, dy = (torch.randn(rows, width, device=device, dtype=dtype) for width in (inner, columns))
    return x, dy
