"""Makes Megatron-LM's log show each job's mean loss over its own steps.

The trainer adds every iteration's losses up and divides by the iterations of the interval. A job
steps in some iterations and not in others, so that its sum has to be divided by its own steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.training.super_model import StepReport

ALL_JOBS = "lm loss"
"""Mean over the target tokens of all jobs that stepped."""
_ADVANCED = "advanced iterations"
"""Key under which the trainer counts iterations."""


class IntervalLosses:
    """Losses summed since the last line of the log."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        """Key -> sum and how many were added."""
        self._latest: dict[str, float] = {}

    def add(self, reports: Sequence[StepReport]) -> dict[str, float]:
        """Adds an iteration; returns `loss/NAME` of every job that stepped, and `lm loss`."""
        losses = {f"loss/{report.job.name}": report.outcome.loss for report in reports}
        finite = [report for report in reports if math.isfinite(report.outcome.loss)]
        targets = sum(report.target_tokens for report in finite)
        if targets:
            total = sum(report.outcome.loss * report.target_tokens for report in finite)
            losses = {ALL_JOBS: total / targets} | losses
        for key, loss in losses.items():
            total, count = self._sums.get(key, (0.0, 0))
            self._sums[key] = (total + loss, count + 1)
        self._latest = losses
        return losses

    def correct(self, loss_dict: dict[str, Tensor], totals: dict[str, Any]) -> None:
        """Sets the trainer's sums so that its line shows each key's mean; begins a new interval.

        Args:
            loss_dict: losses of this iteration, not yet added to `totals`.
            totals: the trainer's sums, changed in place. Keys without a value go: they would show
                as 0, or what they were.
        """
        iterations = totals.get(_ADVANCED, 0) + 1
        known = [key for key in totals if key == ALL_JOBS or key.startswith("loss/")]
        for key in known:
            del totals[key]
        for key, (total, count) in self._sums.items():
            # Not read from `loss_dict`: that would wait for the device.
            value = total / count * iterations - self._latest.get(key, 0.0)
            device = loss_dict[key].device if key in loss_dict else None
            totals[key] = torch.tensor([value], dtype=torch.float64, device=device)
        self._sums = {}
