"""The weights of all adapters at one linear, as the kernels read them, and where gradients go.

Shapes: K features in, N features out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tlora_megatron.ops.lora.columns import OutputColumns
from tlora_megatron.ops.lora.tiling import RankLayout

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
    """Whether gradients of A and B lie at 16 bytes. Under s_lora two of these share a linear, one
    its A and one its B, and this is of both: the same kernels must take both, for s and dS lie
    otherwise in others', and dS is scaled otherwise."""
    scaling: torch.Tensor
    """fp32 `[slots]`."""
    dropout: torch.Tensor
    """fp32 `[slots]`: probability of zeroing an input feature."""
    has_dropout: bool
    """Whether any slot's probability is above 0."""
    dropout_key: int
    """Key of this linear (`ops.dropout.masks`)."""
    first_column: int
    """Global index of the first local input feature: a row-parallel linear holds a part."""


def are_aligned(grads: Gradients) -> bool:
    """Whether every row of the gradients lies at 16 bytes."""
    given = [grad for slot in grads for grad in slot if grad is not None]
    return not any(g.data_ptr() % 16 or g.stride(0) * g.element_size() % 16 for g in given)
