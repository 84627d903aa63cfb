"""Other ways to compute a multi-adapter linear: what the fused kernels are measured against.

All of them get an easier job than the package where a linear is fused (q, k, v; gate, up): one pair
of factors of the same rank for the whole output, where the package has a pair for each target. They
return fresh gradients in the compute dtype and accumulate nothing. Dropout is torch's: a stored
mask. Where ranks differ, stacks are padded to the largest.

Shapes: T rows, K features in, N features out, R rank, G adapters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from scripts.bench.linear.workload import (
    AdapterMix,
    Backward,
    FactorGrads,
    Forward,
    SlotWeights,
    TargetWeights,
    Workload,
)
from tlora_megatron.ops.lora.linear_ops import OutputColumns


class PlainFactors(NamedTuple):
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
    def backward(self, index: int, forward: Forward) -> Backward: ...

    @abstractmethod
    def _gradient(self, grads: Any, slot: int) -> FactorGrads:
        """One adapter's part of `Backward.grads`."""

    def weights(self) -> tuple[SlotWeights, ...]:
        n = self._sets[0].weight_NK.shape[0]
        columns = OutputColumns(groups=1, stride=n, begin=0, width=n)
        return tuple(
            SlotWeights(scaling, (TargetWeights(columns, a, b),))
            for scaling, a, b in zip(self._mix.scalings, *self._factors[0], strict=True)
        )

    def keep(self, forward: Forward) -> torch.Tensor | None:
        mask = forward.saved[0]
        return None if mask is None else mask.float() / (1.0 - self._p)

    def clear(self) -> None:  # noqa: B027 - there is nothing to clear
        """Gradients are fresh in every call."""

    def gradients(self, backward: Backward) -> tuple[tuple[FactorGrads, ...], ...]:
        return tuple((self._gradient(backward.grads, g),) for g in range(len(self._mix.ranks)))

    def dropped(self, x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.native_dropout(x_TK, self._p, True) if self._p else (x_TK, None)

    def undropped(self, grad_TK: torch.Tensor, mask_TK: torch.Tensor | None) -> torch.Tensor:
        if mask_TK is None:
            return grad_TK
        return torch.ops.aten.native_dropout_backward(grad_TK, mask_TK, 1.0 / (1.0 - self._p))


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[G, largest rank, features]`, zero rows where a rank is smaller."""
    rows = max(t.shape[0] for t in tensors)
    return torch.stack([F.pad(t, (0, 0, 0, rows - t.shape[0])) for t in tensors])


class _Composed(Baseline):
    """The formula by torch's kernels: s, then the frozen GEMM adds onto the branch (beta = 1).

    That is a pass over the output less than the reverse; backward likewise.
    """

    _factor: torch.Tensor
    """The scaling of each row of s and dS."""

    @staticmethod
    @abstractmethod
    def _mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The product, row group by row group where there are several."""

    def forward(self, index: int) -> Forward:
        operands, (a, b), ends = self._sets[index], self._weights[index], self._ends
        dropped_TK, mask = self.dropped(operands.x_TK)
        s_TR = self._mm(dropped_TK, a.transpose(-2, -1), ends).mul_(self._factor)
        y_TN = self._mm(s_TR, b, ends).addmm_(operands.x_TK, operands.weight_NK.t())
        return Forward(y_TN, (mask, dropped_TK, s_TR))

    def backward(self, index: int, forward: Forward) -> Backward:
        operands, (a, b), ends = self._sets[index], self._weights[index], self._ends
        mask, dropped_TK, s_TR = forward.saved
        ds_TR = self._mm(operands.dy_TN, b.transpose(-2, -1), ends).mul_(self._factor)
        grad_b = self._mm(s_TR.t(), operands.dy_TN, ends)
        grad_a = self._mm(ds_TR.t(), dropped_TK, ends)
        dx_TK = self.undropped(self._mm(ds_TR, a, ends), mask)
        return Backward(dx_TK.addmm_(operands.dy_TN, operands.weight_NK), (grad_a, grad_b))


class GroupedMM(_Composed):
    """Grouped GEMMs over padded ranks: the best composition of torch's own kernels."""

    name = "grouped_mm"

    def _prepare(self, factors: PlainFactors) -> tuple[torch.Tensor, torch.Tensor]:
        self._factor = self._scaling_T1
        return stacked(factors.lora_a), stacked(factors.lora_b)

    @staticmethod
    def _mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(a, b, offs=ends)

    def _gradient(self, grads: Any, slot: int) -> FactorGrads:
        rank = self._mix.ranks[slot]
        return FactorGrads(*(g[slot, :rank] for g in grads))


class Concat(_Composed):
    """All factors side by side: every row computes every adapter's s, and a mask keeps its own.

    With one adapter this is the plain torch composition: mm for s, and beta = 1.
    """

    name = "concat"

    def _prepare(self, factors: PlainFactors) -> tuple[torch.Tensor, torch.Tensor]:
        slots = torch.arange(len(self._mix.ranks), device=self._lengths.device)
        ranks = torch.tensor(self._mix.ranks, device=slots.device)
        of_column, of_row = (torch.repeat_interleave(slots, n) for n in (ranks, self._lengths))
        self._factor = (of_row[:, None] == of_column[None, :]) * self._scaling_G[of_column]
        return torch.cat(factors.lora_a), torch.cat(factors.lora_b)

    @staticmethod
    def _mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b)

    def _gradient(self, grads: Any, slot: int) -> FactorGrads:
        begin = sum(self._mix.ranks[:slot])
        return FactorGrads(*(g[begin : begin + self._mix.ranks[slot]] for g in grads))


class _AutogradBaseline(Baseline):
    """A forward formula as users write it, differentiated by autograd; `lora_b` is `[N, rank]`."""

    def _prepare(self, factors: PlainFactors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        lora_a = [a.detach().clone().requires_grad_() for a in factors.lora_a]
        lora_b = [b.t().contiguous().requires_grad_() for b in factors.lora_b]
        return lora_a, lora_b

    @abstractmethod
    def _branch(
        self, x_TK: torch.Tensor, lora_a: list[torch.Tensor], lora_b: list[torch.Tensor]
    ) -> torch.Tensor:
        """The adapters' output `[T, N]`, scaled."""

    def forward(self, index: int) -> Forward:
        operands = self._sets[index]
        x_TK = operands.x_TK.detach().requires_grad_()
        with torch.enable_grad():
            base_TN = F.linear(x_TK, operands.weight_NK)
            dropped_TK, mask = self.dropped(x_TK)
            y_TN = base_TN + self._branch(dropped_TK, *self._weights[index])
        return Forward(y_TN, (mask, x_TK))

    def backward(self, index: int, forward: Forward) -> Backward:
        lora_a, lora_b = self._weights[index]
        leaves = [forward.saved[1], *lora_a, *lora_b]
        dy_TN = self._sets[index].dy_TN
        dx, *grads = torch.autograd.grad(forward.y_TN, leaves, dy_TN, retain_graph=True)
        return Backward(dx, grads)

    def _gradient(self, grads: Any, slot: int) -> FactorGrads:
        rank, count = self._mix.ranks[slot], len(self._mix.ranks)
        return FactorGrads(grads[slot][:rank], grads[count + slot].t()[:rank])


class BridgeMethod(_AutogradBaseline):
    """The method of Megatron-Bridge's MultiLoRALinear at TP 1, written anew.

    Adapters padded to the largest rank are stacked in every forward; two grouped GEMMs; each
    token's scaling multiplies the whole `[T, N]` output; an add. Left out: its wait for the device
    in `repeat_interleave`. It has no dropout.
    """

    name = "bridge_method"
    has_dropout = False

    def _prepare(self, factors: PlainFactors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        padded = PlainFactors(tuple(stacked(factors.lora_a)), tuple(stacked(factors.lora_b)))
        return super()._prepare(padded)

    def _branch(
        self, x_TK: torch.Tensor, lora_a: list[torch.Tensor], lora_b: list[torch.Tensor]
    ) -> torch.Tensor:
        a_GRK, b_GNR = torch.stack(lora_a), torch.stack(lora_b)
        ends = self._lengths.cumsum(0, dtype=torch.int32)
        s_TR = F.grouped_mm(x_TK, a_GRK.transpose(1, 2), offs=ends)
        branch_TN = F.grouped_mm(s_TR, b_GNR.transpose(1, 2), offs=ends)
        scaling_T = torch.repeat_interleave(
            self._scaling_G, self._lengths, output_size=x_TK.shape[0]
        )
        return branch_TN * scaling_T.unsqueeze(1)


class PeftEager(_AutogradBaseline):
    """Hugging Face PEFT's `lora.Linear` in training, one adapter: five separate operations."""

    name = "peft_eager"
    only_one_adapter = True

    def _branch(
        self, x_TK: torch.Tensor, lora_a: list[torch.Tensor], lora_b: list[torch.Tensor]
    ) -> torch.Tensor:
        return F.linear(F.linear(x_TK, lora_a[0]), lora_b[0]) * self._mix.scalings[0]


class Loop(_AutogradBaseline):
    """PEFT's formula adapter after adapter on a split of the rows, outputs concatenated."""

    name = "loop"

    def _branch(
        self, x_TK: torch.Tensor, lora_a: list[torch.Tensor], lora_b: list[torch.Tensor]
    ) -> torch.Tensor:
        parts = torch.split(x_TK, list(self._mix.lengths))
        each = zip(parts, lora_a, lora_b, self._mix.scalings, strict=True)
        return torch.cat([F.linear(F.linear(x, a), b) * scaling for x, a, b, scaling in each])


BASELINES: dict[str, type[Baseline]] = {
    kind.name: kind for kind in (GroupedMM, Concat, BridgeMethod, PeftEager, Loop)
}


def why_not(name: str, mix: AdapterMix, dropout: float) -> str | None:
    """Why a baseline does not apply to a cell; None if it does."""
    kind = BASELINES[name]
    if kind.only_one_adapter and len(mix.ranks) > 1:
        return "one adapter only"
    if dropout and not kind.has_dropout:
        return "has no dropout"
    return None
