"""Learning rates with the conventions of Hugging Face's schedulers."""

from __future__ import annotations

import math

from tlora_megatron.config.job import ScheduleSpec


def learning_rate(spec: ScheduleSpec, peak: float, step: int, num_steps: int) -> float:
    """Returns the rate of the update after `step` updates (0 for the first) of `num_steps`.

    Warm-up is linear from 0, as `transformers.get_linear_schedule_with_warmup` has it; `min_lr` is
    the value the linear and cosine decays end at.
    """
    warmup = spec.num_warmup_steps(num_steps)
    if step < warmup:
        return peak * step / warmup
    if spec.name == "constant":
        return peak
    done = (step - warmup) / max(1, num_steps - warmup)
    left = 1.0 - done if spec.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return spec.min_lr + (peak - spec.min_lr) * max(0.0, left)
