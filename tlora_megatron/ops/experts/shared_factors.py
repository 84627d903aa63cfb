"""Factors of adapters whose outer one all routed experts share, for `ops.experts.outer`.

Shapes: L experts of a rank, or 1 for what they share; C features, R rank columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class OuterTarget(NamedTuple):
    """One factor of one adapter at one target: the shared one, or those of a rank's experts."""

    columns: slice
    """Its features, of the linear's input or output."""
    ranks: slice
    """Its columns among those that travel."""
    weight: Tensor
    """`[L, R, C]` in the compute dtype."""
    grad: Tensor
    """`[L, R, C]`, fp32."""


@dataclass(frozen=True, eq=False)
class OuterSide:
    """The factors of all adapters on one side: what their experts share, or what each has."""

    targets: tuple[tuple[OuterTarget, ...], ...]
    """Those of each slot's adapter; some have none."""


class OuterFactors(NamedTuple):
    """The factors of all adapters that share the outer one, at one linear of the routed experts."""

    shared: OuterSide
    own: OuterSide
    scaling: Tensor
    """fp32 `[slots]`."""
    width: int
    """Rank columns of a row that travels: those of the adapter that has most, in whole chunks."""
