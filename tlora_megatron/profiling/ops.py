"""Measures single operations: copies, attention by length, frozen linears, adapters on a linear."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.layers.sites import Site
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.frozen.packed_attention import CumulativeLengths, Flash, varlen_attention
from tlora_megatron.ops.quantised.weight import encode_weight
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch, use_micro_batch
from tlora_megatron.planner.cost.adapter_sizes import RANK_CHUNK
from tlora_megatron.planner.hardware import AttentionPoint, GemmPoint
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.profiling.timer import DeviceTimer

_RANKS = (8, 16, 32, 64)
DROPOUTS = (0.0, 0.1)


def copy_bytes_per_s(timer: DeviceTimer, num_bytes: int) -> float:
    """Bandwidth of a copy; read and written bytes both count."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    (seconds,) = timer.medians([lambda: target.copy_(source)], seconds=0.2)
    return 2 * num_bytes / seconds


def measure_attention(
    timer: DeviceTimer, length: int, tokens: int, spec: ModelSpec, dtype: torch.dtype
) -> AttentionPoint:
    """Measures the rates of attention in sequences of one length."""
    count = max(1, tokens // length)
    heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim

    def draw(members: int) -> Tensor:
        shape = (count * length, members, dim)
        return torch.randn(shape, device=timer.device, dtype=dtype, requires_grad=True)

    q, k, v = draw(heads), draw(groups), draw(groups)
    run = _varlen if timer.device.type == "cuda" else _dense
    upstream = torch.randn(count * length, heads, dim, device=timer.device, dtype=dtype)
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs[:] = [run(q, k, v, count, length)]

    def backward() -> None:
        torch.autograd.grad(outputs[0], (q, k, v), upstream)

    there, back = timer.medians([forward, backward], seconds=0.3, ahead=True)
    flops = 4.0 * length * (length + 1) / 2 * heads * dim * count
    return AttentionPoint(
        length=length,
        forward_flops_per_s=flops / there,
        backward_flops_per_s=2.5 * flops / back,
    )


def _varlen(q: Tensor, k: Tensor, v: Tensor, count: int, length: int) -> Tensor:
    begins = torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=q.device)
    lengths = CumulativeLengths(begins, begins, length, length)
    return varlen_attention(q, k, v, Flash(lengths, q.shape[-1] ** -0.5))


def _dense(q: Tensor, k: Tensor, v: Tensor, count: int, length: int) -> Tensor:
    query, key, value = (
        x.view(count, length, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q, k, v)
    )
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape)


class LoraSample(NamedTuple):
    """The time that adapters add to one linear in one setting, and its counts (`LoraCost`)."""

    forward_s: float
    backward_s: float
    frozen_s: float
    """Time of the linear without adapters, forward and backward."""
    input_elements: float
    output_elements: float
    rank_columns: float
    """T N r summed over targets."""
    rank_inputs: float
    """T K r p."""
    gradients: float
    dropped: float
    """T K with dropout."""


def measure_lora(
    spec: ModelSpec, tokens: int, adapters: Sequence[int], dtype: torch.dtype
) -> Iterator[LoraSample]:
    """Measures a layer's four linears with each number of adapters, with and without dropout."""
    layout = ParallelLayout(dp_size=dist.get_world_size())
    with closing(SyntheticRun(spec, layout, dtype=dtype)) as run:
        for count, dropout in itertools.product(adapters, DROPOUTS):
            yield from _lora_samples(run, tokens, count, dropout)


def _lora_samples(run: SyntheticRun, tokens: int, count: int, dropout: float) -> list[LoraSample]:
    lengths = _segments(tokens, count)
    ranks = [_RANKS[i % len(_RANKS)] for i in range(count)] if count > 1 else [16]
    loads = [
        JobLoad(
            name=f"job{i}",
            rank=rank,
            batch_size=1,
            lengths=LengthHistogram.single(length),
            dropout=dropout,
        )
        for i, (rank, length) in enumerate(zip(ranks, lengths, strict=True))
    ]
    bank = run.super_model(loads, tokens).bank
    frozen = AdapterBank(run.sites, [], dtype=run.dtype, device=run.groups.device)
    view = pack_micro_batch(
        [Document(slot=slot, length=length) for slot, length in enumerate(lengths)],
        num_slots=count,
        num_tokens=tokens,
        dropout_keys=list(range(1, count + 1)) if dropout else (),
    )
    samples = []
    for site, module in run.linears:
        times = _linear_times(run.timer, site, module, view, (frozen, bank))
        counts = _counts(site, ranks, lengths, dropout)
        base_s = times[0] + times[1]
        samples.append(LoraSample(times[2] - times[0], times[3] - times[1], base_s, *counts))
    attach(run.linears, frozen)
    return samples


def _linear_times(
    timer: DeviceTimer,
    site: Site,
    module: torch.nn.Module,
    view: MicroBatchView,
    banks: Sequence[AdapterBank],
) -> list[float]:
    """Times of forward and backward with each bank, in turn."""
    rows, inner, device = view.num_tokens, site.in_size, timer.device
    weight = next(module.parameters())
    x = torch.randn(rows, 1, inner, device=device, dtype=weight.dtype, requires_grad=True)
    outputs: dict[int, Tensor] = {}
    upstream = torch.randn(rows, 1, site.out_size, device=device, dtype=weight.dtype)

    def forward(index: int) -> None:
        attach([(site, module)], banks[index])
        with use_micro_batch(view):
            outputs[index], _ = module(x)

    def backward(index: int) -> None:
        torch.autograd.grad(outputs.pop(index), x, upstream)

    calls: list[Callable[[], None]] = []
    for index in range(len(banks)):
        calls += [partial(forward, index), partial(backward, index)]
    return timer.medians(calls, seconds=0.12, most=12, ahead=True)


def _counts(
    site: Site, ranks: Sequence[int], lengths: Sequence[int], dropout: float
) -> tuple[float, ...]:
    own = [t for t in site.targets if not t.target.startswith("linear_")]
    inner, columns = site.in_size, site.out_size
    rows = sum(lengths)
    chunked = sum(
        n * -(-rank // RANK_CHUNK) * RANK_CHUNK for n, rank in zip(lengths, ranks, strict=True)
    )
    widths = [target.columns.size for target in own]
    return (
        rows * inner,
        rows * columns,
        chunked * sum(widths),
        chunked * inner * len(own),
        sum(ranks) * sum(inner + width for width in widths),
        rows * inner if dropout else 0.0,
    )


def _segments(tokens: int, count: int) -> list[int]:
    """Ragged lengths from half to one and a half times the mean, without alignment."""
    weights = [0.5 + (0.618034 * i) % 1.0 for i in range(1, count + 1)]
    ends = [round(tokens * w / sum(weights)) for w in itertools.accumulate(weights)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


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
