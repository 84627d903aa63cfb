"""Speeds of jobs that train together: the planner's model, a cache, and what gangs measure.

The planner's `GroupModel` implements `GroupThroughput`; tests use a table. A predicted speed is
multiplied by the median of measured over predicted speed of the same mix on as many GPUs, else of
the same base on as many GPUs, else of that base on the nearest number of GPUs, else by 1.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from tlora_megatron.planner.search import GroupEstimate
from tlora_megatron.planner.workload import JobLoad, LengthHistogram


class GroupThroughput(Protocol):
    """A model of the speed and memory of jobs that train together on one base model."""

    def estimate(self, jobs: Sequence[JobLoad], num_gpus: int) -> GroupEstimate:
        """Speed and memory of the best plan for `jobs` on `num_gpus` equal GPUs."""


@dataclass(frozen=True, slots=True)
class GroupRates:
    """Tokens per second of a group's members, by kind; equal jobs have equal rates."""

    by_kind: Mapping[int, float]
    total: float
    """Sum over the members."""


OPEN_TOKENS_PER_S = 1.0
"""Stands for the speed of a job that a client drives: on any number of GPUs, alone or beside others
the same, so that no decision is made for its sake."""

Kinds = tuple[int, ...]
"""The kinds of a group's members, ascending; each member contributes one entry."""


class Speeds:
    """A cache of the models' estimates: each question of a run is computed once.

    Jobs with equal base model, adapter, batch and lengths are of one *kind*, a small integer.
    """

    def __init__(self, models: Mapping[str, GroupThroughput]) -> None:
        self._models = models
        self._kinds: dict[tuple[str, JobLoad], int] = {}
        self._loads: list[tuple[str, JobLoad]] = []
        self._memo: dict[tuple[Kinds, int], GroupRates | None] = {}
        self._full: dict[tuple[str, int], float] = {}
        self._residual: dict[tuple[Kinds, int], float] = {}
        self._sizes: dict[tuple[int, int], Mapping[int, float]] = {}
        self._knees: dict[tuple[str, int], float] = {}

    def answers(self) -> dict[tuple[Kinds, int], GroupRates | None]:
        """All that was asked: the rates of groups on GPUs; None: they do not fit into memory."""
        return dict(self._memo)

    def kind(self, base: str, load: JobLoad) -> int:
        """The kind of a known base and a load; loads that differ by name only are different."""
        if base not in self._models:
            known = ", ".join(self._models)
            raise ValueError(f"base model must be one of {known}, got {base!r}")
        key = (base, load)
        number = self._kinds.setdefault(key, len(self._loads))
        if number == len(self._loads):
            self._loads.append(key)
        return number

    def base_of(self, kind: int) -> str:
        return self._loads[kind][0]

    def load_of(self, kind: int) -> JobLoad:
        return self._loads[kind][1]

    def doubt(self, kinds: Kinds, num_gpus: int) -> float:
        """Share by which the speed of a group may be less than its rates say; bounds allow for it.

        0 for a model that nothing has corrected, and for a group that has been measured.
        """
        return 0.0

    def rates(self, kinds: Kinds, num_gpus: int) -> GroupRates | None:
        """Rates of a group on `num_gpus` GPUs, or None if it does not fit into their memory."""
        key = (kinds, num_gpus)
        try:
            return self._memo[key]
        except KeyError:
            found = self._memo[key] = self._ask(kinds, num_gpus)
            return found

    def _ask(self, kinds: Kinds, num_gpus: int) -> GroupRates | None:
        base = self._loads[kinds[0]][0]
        # Members of one kind are different jobs, and the model asks for different names.
        loads = [replace(self._loads[kind][1], name=str(i)) for i, kind in enumerate(kinds)]
        estimate = self._models[base].estimate(loads, num_gpus)
        if not estimate.fits:
            return None
        closed = [kind for kind in kinds if not self._loads[kind][1].is_open]
        if len(closed) < len(kinds):
            return self._beside_open(kinds, tuple(closed), num_gpus)
        rates = tuple(estimate.tokens_per_s)
        by_kind = dict(zip(kinds, rates, strict=True))
        return GroupRates(by_kind, sum(rates))

    def _beside_open(self, kinds: Kinds, closed: Kinds, num_gpus: int) -> GroupRates | None:
        """Rates of a group with jobs that clients drive: the others have those without them."""
        by_kind: dict[int, float] = dict.fromkeys(kinds, OPEN_TOKENS_PER_S)
        total = OPEN_TOKENS_PER_S * (len(kinds) - len(closed))
        if closed:
            rates = self.rates(closed, num_gpus)
            if rates is None:
                return None
            by_kind, total = {**by_kind, **rates.by_kind}, total + rates.total
        return GroupRates(by_kind, total)

    def prepare(self, kind: int, most: int) -> None:
        """Asks the model, for up to `most` GPUs, all that decisions will ask about a job."""
        self.sizes(kind, most)
        for power in range(min(most, _LARGEST_FULL).bit_length()):
            self.full_speed(kind, 1 << power)
            self.knee(kind, 1 << power)

    def sizes(self, kind: int, most: int) -> Mapping[int, float]:
        """Numbers of GPUs worth holding, with its speed on them: powers of two, each 2 % faster."""
        key = (kind, most)
        if key not in self._sizes:
            self._sizes[key] = dict(self._worth_holding(kind, most))
        return self._sizes[key]

    def _worth_holding(self, kind: int, most: int) -> Iterator[tuple[int, float]]:
        fastest = 0.0
        for size in (1 << power for power in range(most.bit_length())):
            rates = self.rates((kind,), size)
            if rates is None and not fastest:
                continue  # it fits on more GPUs
            if rates is None or rates.total < _WORTH * fastest:
                return
            fastest = rates.total
            yield size, fastest

    def residual(self, kinds: Kinds, num_gpus: int) -> float:
        """Residual capacity: the unused share of the GPUs' full speed, 0 to 1."""
        key = (kinds, num_gpus)
        if key not in self._residual:
            rates = self.rates(kinds, num_gpus)
            full = self.full_speed(kinds[0], num_gpus)
            used = 1.0 if rates is None or not full else rates.total / full
            self._residual[key] = max(0.0, 1.0 - used)
        return self._residual[key]

    def knee(self, kind: int, num_gpus: int) -> float:
        """Tokens up to which a round takes hardly longer than one of few tokens."""
        if num_gpus > _LARGEST_FULL:
            return num_gpus / _LARGEST_FULL * self.knee(kind, _LARGEST_FULL)
        key = (self._loads[kind][0], num_gpus)
        if key not in self._knees:
            longest_s = _FLAT * self._round_s(*key, _KNEE_TOKENS[0])
            place = bisect_right(
                _KNEE_TOKENS, longest_s, key=lambda tokens: self._round_s(*key, tokens)
            )
            self._knees[key] = float(num_gpus * _KNEE_TOKENS[max(0, place - 1)])
        return self._knees[key]

    def _round_s(self, base: str, num_gpus: int, tokens: int) -> float:
        """Seconds of a round of one sequence of so many tokens on each GPU."""
        load = replace(_FULL, batch_size=num_gpus, lengths=LengthHistogram.single(tokens))
        estimate = self._models[base].estimate([load], num_gpus)
        return num_gpus * tokens / sum(estimate.tokens_per_s) if estimate.fits else math.inf

    def full_speed(self, kind: int, num_gpus: int) -> float:
        """Tokens per second when the GPUs have enough work: a large batch of short sequences."""
        if num_gpus > _LARGEST_FULL:
            return num_gpus / _LARGEST_FULL * self.full_speed(kind, _LARGEST_FULL)
        base = self._loads[kind][0]
        key = (base, num_gpus)
        if key not in self._full:
            load = replace(_FULL, batch_size=_FULL.batch_size * num_gpus)
            estimate = self._models[base].estimate([load], num_gpus)
            self._full[key] = sum(estimate.tokens_per_s)
        return self._full[key]


_FLAT = 1.03
"""How much longer a round may take than one of few tokens, up to the knee."""
_KNEE_TOKENS = tuple(round(128 * 2 ** (step / 4)) for step in range(21))
"""Tokens of a round on each GPU among which the knee is looked for: 128 to 4,096."""
_LARGEST_FULL = 8
"""GPUs beyond these are taken to add as much each: at full speed they do, and asking takes long."""
_WORTH = 1.02
"""Twice the GPUs must make a job so many times as fast at least."""
_FULL = JobLoad(name="full", rank=1, batch_size=16, lengths=LengthHistogram.single(1024))
"""A load that keeps one GPU at full speed; `batch_size` is multiplied by the number of GPUs."""


_LEAST_ROUNDS = 20
"""Rounds of a mix that must be measured before they count."""
_LEAST_REPORTS = 5
"""Reports of a mix before they count: a busy host makes single ones worth little."""
_MOST_REPORTS = 50
_MOST_BASE_REPORTS = 200
_LEAST_FACTOR, _MOST_FACTOR = 0.5, 2.0
"""Beyond these the measurement is more likely to be wrong than the model."""
_MOST_DOUBT = 0.2
"""With more, no job could be slowed: a bound is 1.5 as a rule."""
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
        self._doubted: float | None = None

    @classmethod
    def beside(cls, known: Speeds) -> CalibratedSpeeds:
        """Speeds of the same kinds by the same models, which nothing has corrected yet."""
        found = cls(known._models)
        found._kinds, found._loads, found._memo = known._kinds, known._loads, known._memo
        return found

    def measured(
        self, kinds: Kinds, num_gpus: int, tokens_per_s: float, rounds: int
    ) -> float | None:
        """Notes the speed of a group; returns the factor in use if it changed by 15 %."""
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
        self._knees.clear()
        self._doubted = None
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
            rates, factor = super().rates(kinds, num_gpus), self.factor(kinds, num_gpus)
            if rates is not None and factor != 1.0:
                by_kind = {kind: rate * factor for kind, rate in rates.by_kind.items()}
                rates = GroupRates(by_kind, rates.total * factor)
            self._scaled[key] = rates
            return rates

    def _round_s(self, base: str, num_gpus: int, tokens: int) -> float:
        """Seconds of a round, corrected by those of the mix of most similar size."""
        alike = [
            (abs(math.log(own / (num_gpus * tokens))), known.used)
            for (kinds, size), known in self._by_mix.items()
            if known.used and size == num_gpus and self.base_of(kinds[0]) == base
            for own in [sum(self.load_of(kind).batch_tokens for kind in kinds)]
        ]
        return super()._round_s(base, num_gpus, tokens) / (min(alike)[1] if alike else 1.0)

    def factor(self, kinds: Kinds, num_gpus: int) -> float:
        """Measured over predicted speed of a group; 1 while nothing is known."""
        own = self._by_mix.get((kinds, num_gpus))
        if own is not None and own.used is not None:
            return own.used
        return self._of_base(self.base_of(kinds[0]), num_gpus)

    def doubt(self, kinds: Kinds, num_gpus: int) -> float:
        """How far measured speeds lie from what their bases' factors say: 19 of 20 lie nearer.

        Half of it for a group that has been measured: its speed may drift.
        """
        if self._doubted is None:
            used = {mix: own.used for mix, own in self._by_mix.items() if own.used}
            errors = sorted(
                abs(factor / self._of_base(self.base_of(mix[0]), size) - 1)
                for (mix, size), factor in used.items()
            )
            most = errors[int(0.95 * len(errors))] if len(errors) >= _LEAST_REPORTS else 0.0
            self._doubted = min(most, _MOST_DOUBT)
        own = self._by_mix.get((kinds, num_gpus))
        return self._doubted / (2 if own is not None and own.used else 1)

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
