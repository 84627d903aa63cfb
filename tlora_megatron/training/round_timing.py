"""The speeds of a run's replicas, the depth of its rounds, and how busy the replicas are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tlora_megatron.model.cp_dispatch import CpRates
from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.packing.cp_teams import rank_ends_ps
from tlora_megatron.training.packing.packing import Round
from tlora_megatron.training.packing.timed_rounds import RoundRule, round_ends_ps
from tlora_megatron.training.round_depth import choose_depth

logger = logging.getLogger(__name__)

RoundDepth = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTiming:
    """The speeds by which a run shares out its rounds."""

    rates: tuple[ReplicaRate, ...]
    """Predicted speed of each data-parallel replica."""
    stages: tuple[int, ...]
    """Pipeline stages of each replica."""
    depth: RoundDepth = 1
    """The value of `run.round_depth`."""
    is_unlike: bool = False
    """Replicas have unlike layouts: then rounds of depth 1 are shared out by time, too."""
    source: str = ""
    """The source of the speeds, for the log."""
    in_seconds: bool = True
    """The speeds are of this machine; else only their ratios mean anything."""

    cp_rates: CpRates | None = None
    """Speeds of teams of a replica's context-parallel ranks, where each micro-batch has its own;
    None = all ranks run all."""

    def ends_ps(self, filled: Round) -> list[int]:
        """Predicted time of each replica for its part of a round, or of each of its ranks."""
        if self.cp_rates is None:
            return round_ends_ps(filled, self.rates)
        return rank_ends_ps(filled, self.cp_rates)

    def rule(self, jobs: Sequence[JobState], *, speaks: bool) -> RoundRule | None:
        """Chooses the rule for the rounds of some jobs; None = balanced by tokens.

        Args:
            speaks: logs a choice.
        """
        if not jobs or (self.depth == 1 and not self.is_unlike):
            return None
        if self.depth != "auto":
            return self._of_depth(self.depth)
        if len(self.rates) == 1:
            return None  # nobody waits
        if any(job.spec.portion_tokens for job in jobs):
            # Dealt out to replicas by their own jobs: depth would slow small jobs for nothing.
            return self._of_depth(1) if self.is_unlike else None
        if max(self.stages) > 1:
            return self._of_depth(1)  # a pipeline's rounds are deep as it is
        outlooks = choose_depth([partial(_lengths, job) for job in jobs], self.rates)
        chosen, first = outlooks[-1], outlooks[0]
        if speaks:
            beside = "" if chosen is first else f"; with 1 they would be {first.busy_share:.0%}"
            logger.info(
                "run.round_depth auto: rounds of %d micro-batches a replica, in which the %d "
                "replicas are busy %.0f %% of the time by prediction (%s)%s",
                chosen.depth, len(self.rates), 100 * chosen.busy_share, self.source, beside,
            )  # fmt: skip
        return self._of_depth(chosen.depth)

    def _of_depth(self, depth: int) -> RoundRule:
        return RoundRule(rates=self.rates, depth=depth, stages=self.stages)


def _lengths(job: JobState, number: int) -> list[int]:
    """Rows of the sequences of a job's batch; behind the last one comes the first."""
    return [len(s.tokens) - 1 for s in job.batch(number % job.plan.num_steps)]


class BusyShare:
    """Adds up how long replicas compute in rounds, and how long for the slowest, by prediction."""

    def __init__(self) -> None:
        self._busy_ps = self._time_ps = 0

    def add(self, ends: Sequence[int]) -> None:
        """Counts a round, from the predicted time of each replica."""
        self._busy_ps += sum(ends)
        self._time_ps += len(ends) * max(ends)

    @property
    def share(self) -> float | None:
        """Share of the replicas' time in which they compute; None before any round."""
        return self._busy_ps / self._time_ps if self._time_ps else None


def describe_rounds(
    timing: RoundTiming | None,
    rule: RoundRule | None,
    busy: BusyShare,
    over_predicted: float | None,
) -> dict[str, Any] | None:
    """Values for `summary.json`; None without speeds of replicas.

    Args:
        over_predicted: measured over predicted time.
    """
    if timing is None:
        return None
    return {
        "round_depth": timing.depth,
        "shared_out_by": "tokens" if rule is None else "predicted time",
        "depth": 1 if rule is None else rule.depth,
        "predicted_busy_share": busy.share,
        "speeds_from": timing.source,
        "measured_over_predicted": over_predicted if timing.in_seconds else None,
    }
