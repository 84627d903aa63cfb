"""Biases of experts' linears: of each row that of its expert, without waiting for the device.

Shapes: L experts, Q rows that lie expert by expert, N features out.
"""

from __future__ import annotations

from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertRuns


def add_biases(
    y_QN: Tensor, biases_LN: Tensor, runs: ExpertRuns, weights_Q: Tensor | None
) -> Tensor:
    """Adds each row's bias to a linear's output, in place; returns it.

    Args:
        weights_Q: have multiplied the linear's input, and multiply its bias; None = nothing has.
    """
    bias_QN = _of_rows(biases_LN, runs, len(y_QN))
    if weights_Q is not None:
        bias_QN = (bias_QN * weights_Q[:, None]).to(y_QN.dtype)
    return y_QN.add_(bias_QN)


def weights_grad(dy_QN: Tensor, biases_LN: Tensor, runs: ExpertRuns) -> Tensor:
    """Returns the gradient of the weights through the biases that they multiply, fp32 `[Q]`."""
    return (dy_QN.float() * _of_rows(biases_LN, runs, len(dy_QN))).sum(-1)


def _of_rows(biases_LN: Tensor, runs: ExpertRuns, num_rows: int) -> Tensor:
    return biases_LN.repeat_interleave(runs.counts_L, dim=0, output_size=num_rows)
