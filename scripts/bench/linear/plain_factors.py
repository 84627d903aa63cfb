"""Factors of the baselines, and what the baselines have in common.

Shapes: T rows, K features in, N features out, R rank, G adapters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from scripts.bench.linear.shapes import AdapterMix
from scripts.bench.linear.workload import (
    Backward,
    FactorGrads,
    Forward,
    SlotWeights,
    TargetWeights,
    Workload,
)
from tlora_megatron.ops.lora.linear_ops import OutputColumns


class PlainFactors(NamedTuple):
    """The adapters' factors of one buffer set."""

    lora_a: tuple[torch.Tensor, ...]
    """`[rank, K]` each."""
    lora_b: tuple[torch.Tensor, ...]
    """`[rank, N]` each: transposed, as the package holds them."""


def draw_factors(workload: Workload, mix: AdapterMix) -> tuple[PlainFactors, ...]:
    """Factors for every buffer set, such that the branch is about half of the frozen output."""
    generator = torch.Generator(workload.device).manual_seed(2)

    def draw(rank: int, features: int, std: float) -> torch.Tensor:
        shape = (rank, features)
        drawn = torch.randn(shape, generator=generator, device=workload.device) * std
        return drawn.to(workload.dtype)

    found = []
    for operands in workload.sets:
        n, k = operands.weight_NK.shape
        pairs = list(zip(mix.ranks, mix.scalings, strict=True))
        lora_a = tuple(draw(r, k, k**-0.5) for r, _ in pairs)
        lora_b = tuple(draw(r, n, 0.5 / (s * r**0.5)) for r, s in pairs)
        found.append(PlainFactors(lora_a, lora_b))
    return tuple(found)


class Baseline(ABC):
    """A provider over `PlainFactors`."""

    name: str
    only_one_adapter = False
    has_dropout = True

    def __init__(
        self, workload: Workload, mix: AdapterMix, factors: Sequence[PlainFactors], dropout: float
    ) -> None:
        self._sets = workload.sets
        self._mix = mix
        self._factors = factors
        self._p = dropout
        device, dtype = workload.device, workload.dtype
        self._ends = torch.tensor(mix.ends, dtype=torch.int32, device=device)
        self._lengths = torch.tensor(mix.lengths, device=device)
        self._scaling_G = torch.tensor(mix.scalings, device=device, dtype=dtype)
        self._scaling_T1 = torch.repeat_interleave(self._scaling_G, self._lengths).unsqueeze(1)
        self._weights = [self._prepare(f) for f in factors]

    @abstractmethod
    def _prepare(self, factors: PlainFactors) -> Any:
        """Lays one set's factors out as this method keeps them between steps."""

    @abstractmethod
    def forward(self, index: int) -> Forward:
        """Output, and whatever backward needs; `saved[0]` is the dropout mask or None."""

    @abstractmethod
    def backward(self, index: int, forward: Forward) -> Backward:
        """Gradients of x and every factor."""

    @abstractmethod
    def _gradient(self, grads: Any, slot: int) -> FactorGrads:
        """One adapter's part of `Backward.grads`."""

    def weights(self) -> tuple[SlotWeights, ...]:
        """The adapters of set 0: one pair for the whole output each."""
        n = self._sets[0].weight_NK.shape[0]
        columns = OutputColumns(groups=1, stride=n, begin=0, width=n)
        return tuple(
            SlotWeights(scaling, (TargetWeights(columns, a, b),))
            for scaling, a, b in zip(self._mix.scalings, *self._factors[0], strict=True)
        )

    def keep(self, forward: Forward) -> torch.Tensor | None:
        """The stored mask over `1 - p`."""
        mask = forward.saved[0]
        return None if mask is None else mask.float() / (1.0 - self._p)

    def clear(self) -> None:  # noqa: B027 - there is nothing to clear
        """Gradients are fresh in every call."""

    def gradients(self, backward: Backward) -> tuple[tuple[FactorGrads, ...], ...]:
        """Gradients of set 0's factors, without padding."""
        return tuple((self._gradient(backward.grads, g),) for g in range(len(self._mix.ranks)))

    def dropped(self, x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`drop(x)` and its mask."""
        return torch.native_dropout(x_TK, self._p, True) if self._p else (x_TK, None)

    def undropped(self, grad_TK: torch.Tensor, mask_TK: torch.Tensor | None) -> torch.Tensor:
        """Gradient of x from that of `drop(x)`."""
        if mask_TK is None:
            return grad_TK
        return torch.ops.aten.native_dropout_backward(grad_TK, mask_TK, 1.0 / (1.0 - self._p))


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[G, largest rank, features]`, zero rows where a rank is smaller."""
    rows = max(t.shape[0] for t in tensors)
    return torch.stack([F.pad(t, (0, 0, 0, rows - t.shape[0])) for t in tensors])
