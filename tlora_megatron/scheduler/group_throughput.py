"""Speeds of jobs that train together: the interface to the planner's model, and a cache over it.

The planner's `GroupModel` implements `GroupThroughput`; tests use a table. Schedulers and the
simulator ask nothing else about speed or memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tlora_megatron.planner.workload import JobLoad, LengthHistogram


class GroupEstimate(Protocol):
    """The model's estimate for one group of jobs on some GPUs."""

    @property
    def tokens_per_s(self) -> Sequence[float]:
        """Speed of each job, in the order in which the jobs were given."""

    @property
    def memory_bytes(self) -> float:
        """Peak memory on the fullest GPU."""

    @property
    def fits(self) -> bool:
        """True if the peak is within the GPU's memory."""


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
    memory_bytes: float


OPEN_TOKENS_PER_S = 1.0
"""Stands for the speed of a job that a client drives: on any number of GPUs, alone or beside others
the same, so that no decision is made for its sake."""

Kinds = tuple[int, ...]
"""The kinds of a group's members, ascending; each member contributes one entry."""


class Speeds:
    """A cache of the models' estimates: each question of a run is computed once.

    Jobs with equal base model, adapter, batch and lengths are of one *kind*, a small integer. A
    trace has tens of kinds and hundreds of thousands of questions about them.
    """

    def __init__(self, models: Mapping[str, GroupThroughput]) -> None:
        self._models = models
        self._kinds: dict[tuple[str, JobLoad], int] = {}
        self._loads: list[tuple[str, JobLoad]] = []
        self._memo: dict[tuple[Kinds, int], GroupRates | None] = {}
        self._full: dict[tuple[str, int], float] = {}
        self._residual: dict[tuple[Kinds, int], float] = {}
        self._sizes: dict[tuple[int, int], Mapping[int, float]] = {}

    @property
    def bases(self) -> tuple[str, ...]:
        """Names of the base models that have a model of their speed."""
        return tuple(self._models)

    @property
    def num_estimates(self) -> int:
        """Number of different questions answered so far."""
        return len(self._memo)

    def answers(self) -> Iterator[tuple[Kinds, int, GroupRates]]:
        """All groups that were asked about and fit into memory, with their GPUs and rates."""
        known = list(self._memo.items())
        return ((kinds, num_gpus, rates) for (kinds, num_gpus), rates in known if rates is not None)

    def kind(self, base: str, load: JobLoad) -> int:
        """The kind of a base model and load; loads that differ only by name are different kinds.

        Raises:
            ValueError: if the base model is not known.
        """
        if base not in self._models:
            known = ", ".join(self._models)
            raise ValueError(f"base model must be one of {known}, got {base!r}")
        key = (base, load)
        number = self._kinds.setdefault(key, len(self._loads))
        if number == len(self._loads):
            self._loads.append(key)
        return number

    def base_of(self, kind: int) -> str:
        """Name of the base model of a kind."""
        return self._loads[kind][0]

    def load_of(self, kind: int) -> JobLoad:
        """The load of a kind."""
        return self._loads[kind][1]

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
            return self._beside_open(kinds, tuple(closed), num_gpus, estimate.memory_bytes)
        rates = tuple(estimate.tokens_per_s)
        by_kind = dict(zip(kinds, rates, strict=True))
        return GroupRates(by_kind, sum(rates), estimate.memory_bytes)

    def _beside_open(
        self, kinds: Kinds, closed: Kinds, num_gpus: int, memory_bytes: float
    ) -> GroupRates | None:
        """Rates of a group with jobs that clients drive: the others have those without them."""
        by_kind: dict[int, float] = dict.fromkeys(kinds, OPEN_TOKENS_PER_S)
        total = OPEN_TOKENS_PER_S * (len(kinds) - len(closed))
        if closed:
            rates = self.rates(closed, num_gpus)
            if rates is None:
                return None
            by_kind, total = {**by_kind, **rates.by_kind}, total + rates.total
        return GroupRates(by_kind, total, memory_bytes)

    def prepare(self, kind: int, most: int) -> None:
        """Asks the model all that decisions ask about one job, so that none has to wait for it.

        Callers do so when a job is submitted; `most` are the GPUs of the cluster.
        """
        self.sizes(kind, most)
        for power in range(min(most, _LARGEST_FULL).bit_length()):
            self.full_speed(kind, 1 << power)

    def sizes(self, kind: int, most: int) -> Mapping[int, float]:
        """Numbers of GPUs that are worth holding for one job, with its speed on them.

        Powers of two up to `most`, each faster than the one before by 2 % at least.
        """
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

    def full_speed(self, kind: int, num_gpus: int) -> float:
        """Tokens per second when the GPUs have enough work: a large batch of short sequences.

        No group of this base model is faster, except for small differences from cheaper adapters
        or longer sequences.
        """
        if num_gpus > _LARGEST_FULL:
            return num_gpus / _LARGEST_FULL * self.full_speed(kind, _LARGEST_FULL)
        base = self._loads[kind][0]
        key = (base, num_gpus)
        if key not in self._full:
            load = replace(_FULL, batch_size=_FULL.batch_size * num_gpus)
            estimate = self._models[base].estimate([load], num_gpus)
            self._full[key] = sum(estimate.tokens_per_s)
        return self._full[key]


_LARGEST_FULL = 8
"""GPUs beyond these are taken to add as much each: at full speed they do, and asking takes long."""
_WORTH = 1.02
"""Twice the GPUs must make a job so many times as fast at least."""
_FULL = JobLoad(name="full", rank=1, batch_size=16, lengths=LengthHistogram.single(1024))
"""A load that keeps one GPU at full speed; `batch_size` is multiplied by the number of GPUs."""
