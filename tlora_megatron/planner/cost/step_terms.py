"""What one round of the super-model is predicted to cost, term by term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from tlora_megatron.planner.rounds.load import RoundLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Seconds of one round by term; the terms add up to the whole.

    Compute and communication are those of the mean pipeline stage over the round's micro-batches.
    """

    gemm_s: float
    attention_s: float
    elementwise_s: float
    lora_s: float
    head_s: float
    """Time of output layer and loss."""
    recompute_s: float
    tp_comm_s: float
    cp_comm_s: float
    ep_comm_s: float
    """Time to carry rows to their experts and back, with the host's wait before it and the wait for
    the rank whose experts got most rows."""
    pp_comm_s: float
    host_s: float
    """Time that the GPU waits for launches."""
    imbalance_s: float
    """Time that the slowest stage takes beyond the mean one."""
    bubble_s: float
    """Filling and draining of the pipeline; its share shrinks with more jobs' micro-batches."""
    replica_wait_s: float
    """Time that the mean replica waits for the slowest, which has the longest sequences."""
    gradient_sync_s: float
    optimizer_s: float
    round_s: float
    """Packing of the round, and the wait at its end."""
    load: RoundLoad
    busy_share: float = 1.0
    """Share of a round's work in which data-parallel replicas compute, by prediction."""

    @property
    def step_time_s(self) -> float:
        """Time of a round."""
        return sum(_all_terms(self))

    @property
    def tokens_per_s(self) -> float:
        """Speed of all jobs together."""
        return self.load.tokens / self.step_time_s

    @property
    def job_tokens_per_s(self) -> tuple[float, ...]:
        """Speed of each job."""
        return tuple(tokens / self.step_time_s for tokens in self.load.job_tokens)

    @property
    def job_step_time_s(self) -> tuple[float, ...]:
        """Time from one optimizer step to the next, for each job."""
        return tuple(self.step_time_s / steps for steps in self.load.steps)

    @property
    def binding(self) -> str:
        """Name of the largest term."""
        return max(TERMS, key=lambda name: getattr(self, name))


TERMS = (
    "gemm_s",
    "attention_s",
    "elementwise_s",
    "lora_s",
    "head_s",
    "recompute_s",
    "tp_comm_s",
    "cp_comm_s",
    "ep_comm_s",
    "pp_comm_s",
    "host_s",
    "imbalance_s",
    "bubble_s",
    "replica_wait_s",
    "gradient_sync_s",
    "optimizer_s",
    "round_s",
)
_all_terms: Callable[[StepCost], tuple[float, ...]] = attrgetter(*TERMS)
