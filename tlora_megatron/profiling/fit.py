"""Fits the cost of adapters on a linear by non-negative least squares over measured samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tlora_megatron.planner.hardware import LoraCost
from tlora_megatron.profiling.ops import LoraSample

_SWEEPS = 2000


def fit_lora(samples: Sequence[LoraSample]) -> tuple[LoraCost, float]:
    """Fits the coefficients; returns them with the median relative error of the linear's time.

    Errors are relative to the linear's time, so that small linears count as much as large ones.

    Raises:
        ValueError: if there is no sample.
    """
    if not samples:
        raise ValueError("samples must hold at least one, got none")
    table = np.array(samples, dtype=np.float64)
    forward_s, backward_s, frozen_s, inputs, outputs, rank_n, rank_k, grads, dropped = table.T
    ones = np.ones_like(inputs)
    there = np.stack([ones, inputs, rank_n, grads, dropped], axis=1)
    back = np.stack([ones, 2 * outputs + inputs, rank_k, grads, dropped], axis=1)
    forward = non_negative_fit(there, forward_s, 1 / frozen_s)
    backward = non_negative_fit(back, backward_s, 1 / frozen_s)
    measured = frozen_s + forward_s + backward_s
    predicted = frozen_s + there @ forward + back @ backward
    names = ("fixed", "input", "rank", "factor", "dropout")
    cost = {f"forward_{n}_s": float(c) for n, c in zip(names, forward, strict=True)}
    names = ("fixed", "stream", "rank", "factor", "dropout")
    cost |= {f"backward_{n}_s": float(c) for n, c in zip(names, backward, strict=True)}
    return LoraCost(**cost), float(np.median(np.abs(predicted / measured - 1)))


def non_negative_fit(features: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Non-negative coefficients `[features]` with the least weighted squared error.

    Coordinate descent, which converges since the problem is convex.

    Args:
        features: `[samples, features]`.
        values: `[samples]`.
        weights: `[samples]`, on the errors.
    """
    x = features * weights[:, None]
    y = values * weights
    scale = np.linalg.norm(x, axis=0)
    scale[scale == 0] = 1.0
    x = x / scale
    gram, target = x.T @ x, x.T @ y
    found = np.zeros(x.shape[1])
    for _ in range(_SWEEPS):
        for j in range(len(found)):
            if gram[j, j] > 0:
                step = (target[j] - gram[j] @ found) / gram[j, j]
                found[j] = max(0.0, found[j] + step)
    return found / scale
