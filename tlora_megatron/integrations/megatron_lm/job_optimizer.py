"""Stand-ins for the optimizer, the schedule and the losses that Megatron-LM's trainer expects.

The trainer adds every iteration's losses up and divides by the iterations of the interval. A job
steps in some iterations and not in others, so that its sum has to be divided by its own steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn

from tlora_megatron.training.super_model import StepReport


class JobOptimizer(MegatronOptimizer):
    """Stand-in for the trainer's optimizer, whose step ends the round of the jobs.

    Every job whose global batch is complete steps with its own optimizer. The stand-in holds no
    parameter of the frozen model, so the trainer has nothing to save, load or clip.

    Args:
        config: Megatron's; unused but by the trainer.
        end_round: steps the jobs; returns the largest gradient norm and the largest learning rate
            among those that stepped, 0 where none did.
    """

    def __init__(
        self, config: Any, end_round: Callable[[], tuple[float, float]], device: torch.device
    ) -> None:
        nothing = nn.Parameter(torch.zeros(1, device=device))
        super().__init__(torch.optim.SGD([nothing], lr=0.0), config)
        self.is_stub_optimizer = False
        self._end_round = end_round
        self._scale = torch.ones(1, device=device)
        for group in self.optimizer.param_groups:
            group.update(default_config=True, lr_mult=1.0, wd_mult=1.0, max_lr=0.0, min_lr=0.0)

    def step(self) -> tuple[bool, float, None]:
        """Returns Megatron's success, gradient norm, and no count of zero gradients."""
        grad_norm, lr = self._end_round()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return True, grad_norm, None

    def get_loss_scale(self) -> Tensor:
        """Returns 1: a job's loss is weighted where it is computed."""
        return self._scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: a job's gradient lives until its own step, maybe for several rounds."""

    def prepare_grads(self) -> bool:
        """Returns False, for no inf found: each job looks for its own."""
        return False

    def step_with_ready_grads(self) -> bool:
        """Returns True; Megatron's own `step`, which calls it, is not used."""
        return True

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Does nothing: the loaded base has no master weights."""

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Returns nothing: jobs have checkpoints of their own."""
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Ignores the state: jobs have checkpoints of their own."""

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Returns nothing: jobs have checkpoints of their own."""
        return {}


class NoSchedule:
    """Stand-in for the trainer's schedule; leaves the logged learning rate as the jobs set it."""

    num_steps = 0

    def step(self, increment: int = 0) -> None:
        """Counts samples like Megatron's schedule."""
        self.num_steps += increment

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: jobs have checkpoints of their own."""
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Ignores the state."""


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
