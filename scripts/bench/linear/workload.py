"""Buffers of one measured linear, and what a way to compute it must offer to be measured.

Shapes: T rows, K features in, N features out, R rank.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from tlora_megatron.layers.sites import Site, make_site
from tlora_megatron.ops.lora.linear_ops import OutputColumns
from tlora_megatron.profiling.sizes import LLAMA_8B, LLAMA_70B, TINY

RANKS = (8, 16, 32, 64)
SCALINGS = (2.0, 1.0, 0.5, 4.0)
LONE_RANK = 16
LINEARS = {"qkv": "linear_qkv", "o": "linear_proj", "gate_up": "linear_fc1", "down": "linear_fc2"}

MODELS = {"8b": (LLAMA_8B, 1), "70b_tp4": (LLAMA_70B, 4), "tiny": (TINY.layer_spec, 1)}
"""A prefix of shape names: the model and the tensor-parallel size whose shard is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """One frozen linear as one tensor-parallel rank holds it."""

    name: str
    model: str
    linear: str

    @property
    def site(self) -> Site:
        spec, tp_size = MODELS[self.model]
        return make_site(spec, 0, self.linear, 0, tp_size)


SHAPES = {
    f"{model}_{short}": LinearShape(name=f"{model}_{short}", model=model, linear=linear)
    for model in MODELS
    for short, linear in LINEARS.items()
}
MEASURED = tuple(name for name in SHAPES if not name.startswith("tiny"))
"""Shapes measured by default; the tiny ones are for tests on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterMix:
    """The adapters of a micro-batch, and how many rows each has."""

    ranks: tuple[int, ...]
    scalings: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.lengths))


def adapter_mix(tokens: int, adapters: int) -> AdapterMix:
    """Ranks 8, 16, 32, 64 in turn (a lone adapter: 16) over ragged segments."""
    cycled = tuple(RANKS[i % len(RANKS)] for i in range(adapters))
    return AdapterMix(
        ranks=cycled if adapters > 1 else (LONE_RANK,),
        scalings=tuple(SCALINGS[i % len(SCALINGS)] for i in range(adapters)),
        lengths=segment_lengths(tokens, adapters),
    )


def segment_lengths(tokens: int, adapters: int) -> tuple[int, ...]:
    """Log-normal lengths, about half to twice the mean, aligned to nothing, in all `tokens`."""
    if tokens < adapters:
        raise ValueError(f"tokens must be at least one an adapter ({adapters}), got {tokens}")
    draw = random.Random(1000 * adapters + tokens)
    weights = [draw.lognormvariate(0.0, 0.5) for _ in range(adapters)]
    spare = tokens - adapters
    bounds = [round(spare * w / sum(weights)) for w in itertools.accumulate(weights)]
    return tuple(1 + e - b for b, e in itertools.pairwise((0, *bounds)))


MAX_SETS = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BufferSet:
    x_TK: torch.Tensor
    weight_NK: torch.Tensor
    dy_TN: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workload:
    """Several sets of operands of one linear, so that successive calls find none of them in L2."""

    shape: LinearShape
    tokens: int
    sets: tuple[BufferSet, ...]

    @property
    def device(self) -> torch.device:
        return self.sets[0].x_TK.device

    @property
    def dtype(self) -> torch.dtype:
        return self.sets[0].x_TK.dtype


def make_workload(
    shape: LinearShape, tokens: int, *, device: torch.device, dtype: torch.dtype
) -> Workload:
    """Draws operands such that outputs and gradients are of the order of 1."""
    site = shape.site
    k, n = site.in_size, site.out_size
    generator = torch.Generator(device).manual_seed(1)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)

    set_bytes = (tokens * (k + n) + k * n) * dtype.itemsize
    sets = tuple(
        BufferSet(x_TK=draw(tokens, k), weight_NK=draw(n, k).mul_(k**-0.5), dy_TN=draw(tokens, n))
        for _ in range(num_sets(set_bytes, l2_bytes(device)))
    )
    return Workload(shape=shape, tokens=tokens, sets=sets)


def num_sets(set_bytes: int, cache_bytes: int) -> int:
    """At least two, and enough that all sets are four times the cache (or `MAX_SETS`)."""
    return min(MAX_SETS, max(2, math.ceil(4 * cache_bytes / set_bytes)))


def l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).L2_cache_size


class TargetWeights(NamedTuple):
    columns: OutputColumns
    lora_a_RK: torch.Tensor
    lora_b_RN: torch.Tensor


class SlotWeights(NamedTuple):
    scaling: float
    targets: tuple[TargetWeights, ...]


class FactorGrads(NamedTuple):
    lora_a_RK: torch.Tensor
    lora_b_RN: torch.Tensor


class Forward(NamedTuple):
    y_TN: torch.Tensor
    saved: Any


class Backward(NamedTuple):
    dx_TK: torch.Tensor
    grads: Any


class Provider(Protocol):
    """One way to compute the linear with its adapters; `index` picks the buffer set.

    `backward` may add gradients to what `clear` zeroes. Of set 0, `weights` are the adapters slot
    by slot, `keep` dropout's factors of x in fp32 `[T, K]` (None = no dropout), and `gradients`
    those of the factors, `[slot][target]`.
    """

    name: str

    def forward(self, index: int) -> Forward: ...
    def backward(self, index: int, forward: Forward) -> Backward: ...
    def weights(self) -> tuple[SlotWeights, ...]: ...
    def keep(self, forward: Forward) -> torch.Tensor | None: ...
    def clear(self) -> None: ...
    def gradients(self, backward: Backward) -> tuple[tuple[FactorGrads, ...], ...]: ...


class Frozen:
    """The linear without adapters: one GEMM forward, one backward."""

    name = "frozen"

    def __init__(self, workload: Workload) -> None:
        self._sets = workload.sets

    def forward(self, index: int) -> Forward:
        operands = self._sets[index]
        return Forward(F.linear(operands.x_TK, operands.weight_NK), None)

    def backward(self, index: int, forward: Forward) -> Backward:
        operands = self._sets[index]
        return Backward(torch.mm(operands.dy_TN, operands.weight_NK), None)

    def weights(self) -> tuple[SlotWeights, ...]:
        return ()

    def keep(self, forward: Forward) -> torch.Tensor | None:
        return None

    def clear(self) -> None:
        pass

    def gradients(self, backward: Backward) -> tuple[tuple[FactorGrads, ...], ...]:
        return ()
