"""Counts the time and the bytes of a shared expert, as `SharedExpert` runs it.

Its linears are those of a dense MLP: products, adapters and collectives are counted as theirs. Here
is what lies around them: the sigmoid of each row, which weighs the result, and the sum with what
the routed experts return.

"""

from __future__ import annotations

from typing import NamedTuple

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.adapter_sizes import SHARED_EXPERT_LINEARS

_FP32 = 4


class SharedBytes(NamedTuple):
    """Bytes of one layer's shared expert for each row of a context-parallel rank."""

    kept: float
    """Kept for backward."""
    workspace: float
    """Of its backward, beside the gradient that the routed experts have returned."""


def shared_weights(spec: ModelSpec) -> int:
    """Elements of the sigmoid's weight, whole on every rank; 0 without a shared expert."""
    return 0 if spec.shared_ffn_size is None else spec.hidden_size


def gate_passes(spec: ModelSpec, size: int) -> tuple[float, float]:
    """Bytes read and written for a row by the gate and the sum, forward and backward.

    Forward, x is read for the sigmoid, the result is weighed and added to the routed experts'.
    Backward, the sigmoid's gradient is a product in fp32, summed over the row; dy is weighed, and
    both gradients of x are added to each other and to the routed experts'.

    Args:
        size: bytes of an element of the base's activations.
    """
    if spec.shared_ffn_size is None:
        return 0.0, 0.0
    cast = 0 if size == _FP32 else 2 * (size + _FP32)
    product = 4 * _FP32
    forward, backward = (1 + 2 + 3) * size, cast + product + (2 + 1 + 3 + 3) * size
    return float(forward * spec.hidden_size), float(backward * spec.hidden_size)


def shared_bytes(
    spec: ModelSpec, ranks: dict[str, float], plan: Plan, size: int, *, keeps_input: bool
) -> SharedBytes:
    """Counts what a shared expert keeps and works in; nothing without one.

    Kept are gate and up, what comes out before it is weighed, and the weight; for adapters also
    their inputs and rank columns.

    Args:
        ranks: rank columns by linear (`SavedInputs.ranks`).
        size: bytes of an element of the base's activations.
        keeps_input: False where the routed experts' adapters keep the same rows.
    """
    if spec.shared_ffn_size is None:
        return SharedBytes(0.0, 0.0)
    hidden, inner = spec.hidden_size, spec.shared_ffn_size / plan.tp_size
    shard = plan.tp_size if plan.sequence_parallel else 1
    first, second = (ranks[linear] for linear in SHARED_EXPERT_LINEARS)
    kept = 2 * inner * size + (hidden * size + size) / shard
    kept += (first > 0 and keeps_input) * hidden * size / shard
    kept += (second > 0) * inner * size + (first + second) * size
    # Either the gate's gradient: dy and the result in fp32, and their product; or the gradients of
    # gate, up and their product. The routed experts' dx waits beside.
    gate = (2 * (size != _FP32) + 1) * _FP32 * hidden / shard
    return SharedBytes(kept, hidden * size / shard + max(gate, 3 * inner * size))
