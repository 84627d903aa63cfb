"""The weights of all adapters at one linear, as the kernels read them, and their gradients.

Shapes: K features in, N features out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from tlora_megatron.ops.lora.columns import OutputColumns
from tlora_megatron.ops.lora.tiling import RankLayout
from tlora_megatron.ops.routing.row_groups import RowGroups

T = TypeVar("T")
Gradients = tuple[tuple[torch.Tensor | None, ...], ...]
"""`[slot][target]`: fp32 views of gradient slabs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteFactors:
    """Arenas of one linear's factors in the compute dtype, and views of the jobs' gradients."""

    layout: RankLayout
    columns: tuple[OutputColumns, ...]
    """A target: its columns of the linear's output."""
    lora_a: torch.Tensor
    """`[layout.a_rows, K]`; rows beyond a rank are zero."""
    lora_b: tuple[torch.Tensor, ...]
    """A target: `[layout.b_rows[p], N of the target]`, transposed; rows beyond a rank are zero."""
    grad_a: Gradients
    """`[slot][target]`: fp32 view `[rank, K]` of the job's gradient slab; None where absent."""
    grad_b: Gradients
    """`[slot][target]`: fp32 view `[rank, N of the target]`; None where absent."""
    is_aligned: bool
    """True if all gradients of the linear lie at 16 bytes. Under s_lora one `SiteFactors` has the
    linear's A and another its B. Both say the same, because the same kernels must compute both:
    others lay s and dS out differently, and scale dS differently."""
    scaling: torch.Tensor
    """fp32 `[slots]`."""
    dropout: torch.Tensor
    """fp32 `[slots]`: probability of zeroing an input feature."""
    has_dropout: bool
    """True if any slot's probability is above 0."""
    dropout_key: int
    """Key of this linear (`ops.dropout.masks`)."""
    first_column: int
    """Global index of the first local input feature: a row-parallel linear holds a part."""
    _cache: dict[Callable[[SiteFactors], Any], Any] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def size_in(self) -> int:
        """Local input features K."""
        return self.lora_a.shape[1]

    @property
    def size_out(self) -> int:
        """Local output features N of the fused linear."""
        return self.columns[0].groups * self.columns[0].stride

    def uses_dropout(self, rows: RowGroups) -> bool:
        """True if any element of these rows may be dropped; evaluation has no keys."""
        return self.has_dropout and bool(rows.dropout_keys)

    def cached(self, build: Callable[[SiteFactors], T]) -> T:
        """Returns what `build` makes of these factors, made once.

        What it makes must not hold the factors: a cycle would keep both, and their device memory,
        until Python looks for cycles.
        """
        if build not in self._cache:
            self._cache[build] = build(self)
        found: T = self._cache[build]
        return found


def are_aligned(grads: Gradients) -> bool:
    """True if every row of the gradients lies at 16 bytes."""
    given = [grad for slot in grads for grad in slot if grad is not None]
    return not any(g.data_ptr() % 16 or g.stride(0) * g.element_size() % 16 for g in given)
