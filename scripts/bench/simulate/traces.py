"""Traces that are drawn from a seed: an ordinary one, and some that are hard on a scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tlora_megatron.sim.trace import Trace, TraceRow

_SIZES = (1, 2, 4, 8, 16)
_SHARES = (60, 12, 12, 12, 4)
_LONGEST_S = 7 * 86400.0


def _poisson(mean_s: float) -> Callable[[Random], float]:
    return lambda rng: rng.expovariate(1 / mean_s)


_one_a_minute = _poisson(60)


def _log_normal(rng: Random) -> float:
    return math.exp(rng.gauss(math.log(1800), 1.5))


def _mixed_sizes(rng: Random) -> int:
    return rng.choices(_SIZES, _SHARES)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """How the jobs of a trace are drawn."""

    num_jobs: int
    gap_s: Callable[[Random], float] = _one_a_minute
    """From one submission to the next."""
    duration_s: Callable[[Random], float] = _log_normal
    num_gpus: Callable[[Random], int] = _mixed_sizes
    load: float | None = None
    """Offered load; None: submissions as drawn."""
    name: str

    def draw(self, seed: int) -> Trace:
        """The trace of a seed."""
        rng = Random(f"{self.name} {seed}")
        rows, now_s = [], 0.0
        for index in range(self.num_jobs):
            now_s += self.gap_s(rng)
            rows.append(
                TraceRow(
                    name=str(index),
                    submit_s=now_s,
                    duration_s=min(self.duration_s(rng), _LONGEST_S),
                    num_gpus=self.num_gpus(rng),
                )
            )
        return Trace(name=self.name, rows=tuple(rows), dropped={})


def synthetic(seed: int) -> Trace:
    """Poisson arrivals; log-normal durations, median 30 min; one GPU mostly, 16 at most."""
    return Crowd(name="synthetic", num_jobs=1500).draw(seed)


ADVERSARIAL = {
    crowd.name: crowd
    for crowd in (
        Crowd(name="5,000 in a minute", num_jobs=5000, gap_s=_poisson(60 / 5000)),
        Crowd(name="1,000 at once", num_jobs=1000, gap_s=lambda rng: 0.0),
        Crowd(name="all 1 GPU", num_jobs=1500, num_gpus=lambda rng: 1, load=2.0),
        Crowd(name="all 64 GPUs", num_jobs=500, num_gpus=lambda rng: 64, load=2.0),
        # Median 8 min, and a mean that the longest few make.
        Crowd(
            name="heavy tail",
            num_jobs=1500,
            duration_s=lambda rng: 250 * rng.paretovariate(1.05),
            load=2.0,
        ),
    )
}
"""By name."""
