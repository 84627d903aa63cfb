"""Speeds that are corrected by what gangs measure, so that decisions rest on the machine at hand.

A predicted speed is multiplied by the median of measured over predicted speed of the same mix on as
many GPUs, else of the same base model on as many GPUs, else of that base on the nearest number of
GPUs, else by 1. So a machine that is slow on one GPU does not look fast on two, never tried.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from tlora_megatron.scheduler.group_throughput import GroupRates, GroupThroughput, Kinds, Speeds

_LEAST_ROUNDS = 20
"""Rounds of a mix that must be measured before they count."""
_LEAST_REPORTS = 5
"""Reports of a mix before they count: a busy host makes single ones worth little."""
_MOST_REPORTS = 50
_MOST_BASE_REPORTS = 200
_LEAST_FACTOR, _MOST_FACTOR = 0.5, 2.0
"""Beyond these the measurement is more likely to be wrong than the model."""
_DRIFT = 0.15
"""Relative change of a factor from which it replaces the one in use."""


@dataclass(slots=True)
class _Factor:
    """Ratios of measured to predicted speed, and the factor in use."""

    most: int
    reports: deque[tuple[float, int]] = field(default_factory=deque)
    """Ratio, and the number of rounds over which it was measured."""
    used: float | None = None

    def add(self, ratio: float, rounds: int) -> bool:
        """Adds a report; returns True if it gives a factor that differs from the one in use."""
        self.reports.append((ratio, rounds))
        if len(self.reports) > self.most:
            self.reports.popleft()
        rounds = sum(own for _, own in self.reports)
        if rounds < _LEAST_ROUNDS or len(self.reports) < _LEAST_REPORTS:
            return False
        found = median(ratio for ratio, _ in self.reports)
        found = min(_MOST_FACTOR, max(_LEAST_FACTOR, found))
        if self.used is not None and abs(found / self.used - 1) < _DRIFT:
            return False
        self.used = found
        return True


class CalibratedSpeeds(Speeds):
    """The planner's speeds, times factors that are learnt while gangs train."""

    def __init__(self, models: Mapping[str, GroupThroughput]) -> None:
        super().__init__(models)
        self.version = 0
        """Grows whenever a factor drifts, and speeds that were given before are no longer good."""
        self._by_mix: dict[tuple[Kinds, int], _Factor] = {}
        self._by_base: dict[tuple[str, int], _Factor] = {}
        self._scaled: dict[tuple[Kinds, int], GroupRates | None] = {}
        self._fastest: dict[tuple[str, int], float] = {}
        self._of_bases: dict[tuple[str, int], float] = {}

    def measured(
        self, kinds: Kinds, num_gpus: int, tokens_per_s: float, rounds: int
    ) -> float | None:
        """Notes the speed of a group that did not change meanwhile.

        Returns:
            The factor now in use if it has changed by 15 % or more, else None.
        """
        predicted = super().rates(kinds, num_gpus)
        if predicted is None or not predicted.total or tokens_per_s <= 0:
            return None
        ratio = tokens_per_s / predicted.total
        mix, base = (kinds, num_gpus), (self.base_of(kinds[0]), num_gpus)
        own = self._by_mix.setdefault(mix, _Factor(_MOST_REPORTS))
        shared = self._by_base.setdefault(base, _Factor(_MOST_BASE_REPORTS))
        self._fastest[base] = max(self._fastest.get(base, 0.0), tokens_per_s)
        before = self.factor(*mix)
        if not any([own.add(ratio, rounds), shared.add(ratio, rounds)]):
            return None
        self._scaled.clear()
        self._of_bases.clear()
        self._residual.clear()
        self._sizes.clear()
        if abs(self.factor(*mix) / before - 1) < _DRIFT:
            return None
        self.version += 1
        return self.factor(*mix)

    def rates(self, kinds: Kinds, num_gpus: int) -> GroupRates | None:
        """Rates of a group, corrected; None if it does not fit into the GPUs' memory."""
        key = (kinds, num_gpus)
        try:
            return self._scaled[key]
        except KeyError:
            found = self._scaled[key] = self._correct(kinds, num_gpus)
            return found

    def _correct(self, kinds: Kinds, num_gpus: int) -> GroupRates | None:
        rates = super().rates(kinds, num_gpus)
        factor = self.factor(kinds, num_gpus)
        if rates is None or factor == 1.0:
            return rates
        by_kind = {kind: rate * factor for kind, rate in rates.by_kind.items()}
        return GroupRates(by_kind, rates.total * factor, rates.memory_bytes)

    def factor(self, kinds: Kinds, num_gpus: int) -> float:
        """Measured over predicted speed of a group; 1 while nothing is known."""
        own = self._by_mix.get((kinds, num_gpus))
        if own is not None and own.used is not None:
            return own.used
        return self._of_base(self.base_of(kinds[0]), num_gpus)

    def _of_base(self, base: str, num_gpus: int) -> float:
        """The factor of a base model on as many GPUs, or on the nearest number that was tried."""
        key = (base, num_gpus)
        if key not in self._of_bases:
            tried = [
                (abs(math.log2(size / num_gpus)), size, known.used)
                for (other, size), known in self._by_base.items()
                if other == base and known.used is not None
            ]
            self._of_bases[key] = min(tried)[2] if tried else 1.0
        return self._of_bases[key]

    def full_speed(self, kind: int, num_gpus: int) -> float:
        """Tokens per second with enough work, corrected; no less than was ever measured."""
        base = (self.base_of(kind), num_gpus)
        full = super().full_speed(kind, num_gpus) * self._of_base(*base)
        return max(full, self._fastest.get(base, 0.0))
