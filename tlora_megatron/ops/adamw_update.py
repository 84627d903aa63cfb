"""The arguments of one AdamW update of one adapter."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AdamUpdate(NamedTuple):
    """One adapter's update; the four tensors are flat, contiguous fp32 of one length."""

    master: Tensor
    grad: Tensor
    """Consumed: zero afterwards, also where the update is skipped."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Counts this update: 1 is the first."""
    clip: float | Tensor
    """Multiplier of the gradient, or an fp32 `[]` on its device that is read without waiting.

    Where it is not finite the update is skipped: only the gradient changes.
    """
