"""Counts the bytes that routed experts keep and work in, as `FrozenExperts` runs them.

Bytes are counted for each row of a context-parallel rank. A unit test holds them to what a layer of
experts allocates.
"""

from __future__ import annotations

from typing import NamedTuple

from tlora_megatron.planner.cost.experts.adapters import KeptInputs
from tlora_megatron.planner.cost.experts.split import ExpertSplit

_INDEX = 8
"""Bytes of an integer that says where a row goes."""
_FP32 = 4
_NO_ADAPTERS = KeptInputs()


class RoutedBytes(NamedTuple):
    """Bytes of one layer's router and experts, by row."""

    kept: float
    """Kept for backward, whoever computes the rows."""
    kept_routed: float
    """Kept for backward by the mean rank for the rows that its experts compute."""
    workspace: float
    """Of the backward of the fullest rank."""


def routed_bytes(split: ExpertSplit, size: int, adapters: KeptInputs = _NO_ADAPTERS) -> RoutedBytes:
    """Counts the bytes of a layer's router and experts.

    Kept are the first linear's outputs, the weights of the choices and where each row lies; for
    adapters also their rank columns and the experts' input. Backward needs most either at the
    second linear, at SwiGLU or behind the first linear.

    Args:
        size: bytes of an element of the base's activations.
        adapters: what they need.
    """
    spec, hidden, inner = split.spec, split.hidden_size, split.inner
    is_shared = split.ep_size > 1
    weight = _FP32 if spec.keeps_fp32 else size
    # Four integers say where a choice goes; behind an exchange one more says where it came from.
    choices = spec.top_k * (4 * _INDEX + _FP32)
    choices += 0 if spec.normalizes else spec.num_experts * _FP32
    each = 2 * inner * size + weight + is_shared * _INDEX
    # Rows that came from other ranks are kept; own ones are spread again.
    spread = adapters.reads_routed and not is_shared
    first = size * (hidden * spread + adapters.first_columns)
    second = size * (inner * adapters.recomputes + adapters.second_columns)
    between = size * (hidden + inner) + second
    swiglu = adapters.reads_behind * (inner + adapters.second_columns)
    before = size * (3 * inner + swiglu) + _FP32
    behind = size * (hidden + 2 * inner) + _FP32
    exchanged = is_shared * 2 * size * hidden
    logits = spec.num_experts * (_FP32 + size)
    each += (adapters.first_columns + adapters.second_columns) * size
    choices += adapters.summed * size
    if adapters.reads_routed and is_shared:
        each += hidden * size
    if adapters.first_summed or spread:
        choices += hidden * size
    return RoutedBytes(
        kept=split.row_share * choices,
        kept_routed=split.routed * each,
        workspace=(
            split.routed * split.fullest() * max(between, before, behind + max(first, exchanged))
            + split.row_share * (logits + adapters.first_summed * _FP32)
        ),
    )
