"""The worst error of one measured linear against the definition in fp32.

y and dx are checked on sampled rows, row by row, so that one wrong row is not averaged away; dA
and dB whole, factor by factor.

Shapes: T rows, K features in, N features out, R rank.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from scripts.bench.linear.workload import Backward, BufferSet, Forward, Provider, SlotWeights

MAX_ERROR = 2e-2
"""Relative, of bf16 operands and intermediates; sound ones measure 2e-3 to 5e-3."""
_SAMPLES = 128


class Expected(NamedTuple):
    """fp32 results of one call: y and dx at the sampled rows, every dA and dB in order."""

    y: torch.Tensor
    dx: torch.Tensor
    factors: list[torch.Tensor]


class FrozenRows:
    """Results of the frozen linear alone at sampled rows; every provider needs them."""

    def __init__(self, operands: BufferSet) -> None:
        self._operands = operands
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, rows: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """`x W^T` and `dy W`, fp32, fresh."""
        if rows not in self._known:
            index = torch.tensor(rows, device=self._operands.x_TK.device)
            self._known[rows] = self._computed(index)
        y, dx = self._known[rows]
        return y.clone(), dx.clone()

    def _computed(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight_NK = self._operands.weight_NK.float()
        y = self._operands.x_TK[index].float() @ weight_NK.t()
        return y, self._operands.dy_TN[index].float() @ weight_NK


def sampled_rows(ends: Sequence[int]) -> tuple[int, ...]:
    """First and last row of every segment and some between, ascending."""
    edges = {row for b, e in itertools.pairwise((0, *ends)) for row in (b, e - 1) if e > b}
    draw = random.Random(ends[-1])
    inner = draw.sample(range(ends[-1]), min(_SAMPLES, ends[-1]))
    return tuple(sorted(edges | set(inner)))


def expected(
    operands: BufferSet,
    frozen: FrozenRows,
    weights: Sequence[SlotWeights],
    ends: Sequence[int],
    keep_TK: torch.Tensor | None,
) -> Expected:
    """The definition, segment by segment (`ops.lora.linear_ops` states it)."""
    rows = sampled_rows(ends)
    y, dx = frozen.at(rows)
    factors: list[torch.Tensor] = []
    for slot, (begin, end) in zip(weights, itertools.pairwise((0, *ends)), strict=False):
        x_TK = operands.x_TK[begin:end].float()
        keep = None if keep_TK is None else keep_TK[begin:end]
        dropped_TK = x_TK if keep is None else x_TK * keep
        inside = [i for i, row in enumerate(rows) if begin <= row < end]
        at = torch.tensor(inside, device=x_TK.device)
        local = torch.tensor([rows[i] - begin for i in inside], device=x_TK.device)
        dx_branch = dx.new_zeros(len(inside), dx.shape[1])
        y_at = y[at]
        for target in slot.targets:
            lora_a_RK, lora_b_RN = target.lora_a_RK.float(), target.lora_b_RN.float()
            dy_TN = target.columns.read(operands.dy_TN[begin:end]).float()
            s_TR = slot.scaling * (dropped_TK @ lora_a_RK.t())
            ds_TR = slot.scaling * (dy_TN @ lora_b_RN.t())
            factors += [ds_TR.t() @ dropped_TK, s_TR.t() @ dy_TN]
            target.columns.add(y_at, s_TR[local] @ lora_b_RN)
            dx_branch += ds_TR[local] @ lora_a_RK
        y[at] = y_at
        dx[at] += dx_branch if keep is None else dx_branch * keep[local]
    return Expected(y, dx, factors)


@torch.no_grad()
def worst_error(
    provider: Provider,
    operands: BufferSet,
    frozen: FrozenRows,
    ends: Sequence[int],
    results: tuple[Forward, Backward],
) -> float:
    """The largest relative error of set 0's results; inf where something is not finite."""
    forward, backward = results
    wanted = expected(operands, frozen, provider.weights(), ends, provider.keep(forward))
    rows = torch.tensor(sampled_rows(ends), device=operands.x_TK.device)
    found = [g for slot in provider.gradients(backward) for target in slot for g in target]
    assert len(found) == len(wanted.factors), "a provider must return every factor's gradient"
    errors = [
        _error(forward.y_TN[rows], wanted.y, dim=1).max(),
        _error(backward.dx_TK[rows], wanted.dx, dim=1).max(),
        *(_error(a, b, dim=None) for a, b in zip(found, wanted.factors, strict=True)),
    ]
    return float(torch.stack(errors).nan_to_num(nan=math.inf).max())


def _error(actual: torch.Tensor, wanted: torch.Tensor, dim: int | None) -> torch.Tensor:
    assert actual.shape == wanted.shape, f"{actual.shape} is not the shape {wanted.shape}"
    difference = torch.linalg.vector_norm(actual.float() - wanted, dim=dim)
    return difference / torch.linalg.vector_norm(wanted, dim=dim).clamp(min=1e-30)
