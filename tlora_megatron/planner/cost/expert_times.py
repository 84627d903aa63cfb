"""Times around routed experts that no operation of a hardware profile has, fitted to measured rows.

`python -m scripts.bench.experts.predicted --fit` fits them to scripts/bench/results/experts.csv:
one H200, six layers of Qwen3-30B-A3B and four of Mixtral 8x7B, 8,192 rows a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

FITTED_CHOICES = 65536
"""Choices of experts (rows times `top_k`) in a measured micro-batch of Qwen3-30B-A3B."""
ROUTING_FORWARD = 0.8
"""Share of a layer's small kernels that forward has: 19 of 28 operations, among them top-k and two
sorts, which are several kernels each."""
FIXED = 0.5
"""Share of small kernels' time that does not grow with rows; assumed, since nearly all measured
micro-batches have as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTimes:
    """Seconds, alike on all GPUs: what takes them are many short kernels and the host."""

    routing_s: float = 0.0
    """Of a layer's choices of experts and their order, forward and backward."""
    outer_linear_s: float = 0.0
    """Of the further short kernels at a linear whose outer factors experts share, both ways."""
    job_step_s: float = 0.0
    """Of an optimizer step of a job with adapters on experts, beside the bytes of its elements."""

    def routing(self, choices: float) -> tuple[float, float]:
        """Seconds of one layer's choices, forward and backward."""
        seconds = self.routing_s * _grown(choices)
        return ROUTING_FORWARD * seconds, (1 - ROUTING_FORWARD) * seconds

    def outer(self, choices: float) -> float:
        """Seconds of each direction at a linear whose outer factors experts share."""
        return self.outer_linear_s / 2 * _grown(choices)


def _grown(choices: float) -> float:
    return FIXED + (1 - FIXED) * choices / FITTED_CHOICES


EXPERT_TIMES = ExpertTimes(routing_s=593e-6, outer_linear_s=204e-6, job_step_s=387e-6)
"""Those of the kernels and the host that were measured."""
