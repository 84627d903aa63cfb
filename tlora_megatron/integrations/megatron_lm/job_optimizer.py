"""Stand-ins for the optimizer and the schedule that Megatron-LM's trainer expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn


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
