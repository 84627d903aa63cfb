"""Chooses a deployment: replicas of one kind or several, and how many of each.

Up to `_EXACT` GPUs all counts of all sets of at most `_MOST_KINDS` kinds are looked at, except
those that a bound rules out. Beyond that, each set starts from the bound's shares and is changed
while that helps. The best are run through the dispatcher on drawn rounds; unlike replicas must beat
alike ones by `MARGIN`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlora_megatron.model.layout import Deployment
from tlora_megatron.model.spec import ModelSpec, refuse_experts
from tlora_megatron.planner.deploy_kinds import (
    Kind,
    LengthClass,
    Prices,
    all_kinds,
    divide,
    length_classes,
    most_rows,
    undominated,
)
from tlora_megatron.planner.deploy_sampled import Replicas, Sampled, sample_rounds
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.layouts import Question, SearchSpace
from tlora_megatron.planner.workload import JobLoad, check_jobs, longest_of

_EXACT = 32
_MOST_KINDS = 4
"""More bring tenths of a percent, and each is process groups and shapes of kernels of its own."""
_MOST_SETS = 64
"""Sets of kinds to look at beyond `_EXACT` GPUs, those of the least bound first."""
_KEPT = 24
_WORTH = 1e-3
"""Share of the time below which one deployment counts as no better than another."""


class Counts(NamedTuple):
    """Replicas of some kinds, and the time of all work on them."""

    makespan_s: float
    kinds: tuple[int, ...]
    """Their numbers, ascending."""
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The work and the kinds of replicas that may share it."""

    gpus: tuple[int, ...]
    """GPUs of one replica, by kind."""
    costs: tuple[tuple[float, ...], ...]
    """Seconds that one replica takes for a whole class, by kind and class."""
    num_gpus: int

    @property
    def bound_s(self) -> float:
        """No deployment ends sooner: all replicas busy, every class where it costs least."""
        return self.bound_of(range(len(self.gpus))) if self.gpus else math.inf

    def bound_of(self, kinds: Sequence[int]) -> float:
        """No deployment of these kinds alone ends sooner; infinite if a class fits none."""
        return self.gpu_s(kinds) / self.num_gpus

    def gpu_s(self, kinds: Sequence[int]) -> float:
        """GPU seconds of all work, each class on the one of these kinds where it costs least."""
        by_class = zip(*(self.costs[k] for k in kinds), strict=True)
        gpus = [self.gpus[k] for k in kinds]
        priced = (min(g * s for g, s in zip(gpus, own, strict=True)) for own in by_class)
        return sum(priced, start=0.0)


def best_counts(problem: Problem) -> list[Counts]:
    """Returns deployments that use all GPUs they can, the best first; empty if none holds all."""
    search = _Search(problem)
    sets = [
        (problem.bound_of(kinds), kinds)
        for size in range(1, _MOST_KINDS + 1)
        for kinds in itertools.combinations(range(len(problem.gpus)), size)
        if sum(problem.gpus[k] for k in kinds) <= problem.num_gpus
    ]
    sets = sorted((bound, kinds) for bound, kinds in sets if bound < math.inf)
    exact = problem.num_gpus <= _EXACT
    for bound, kinds in sets if exact else sets[:_MOST_SETS]:
        if bound >= search.best_s * (1 - _WORTH):
            break
        search.look_at(kinds, exact=exact)
    return sorted(search.found)


class _Search:
    """Deployments found so far."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.found: list[Counts] = []
        self.best_s = math.inf

    def look_at(self, kinds: tuple[int, ...], *, exact: bool) -> None:
        """Looks for the best counts of a set of kinds, each at least 1."""
        within = _Set(self._problem, kinds)
        if exact:
            for counts in _all_counts(within.gpus, self._problem.num_gpus):
                if within.bound_s(counts) < self.best_s * (1 - _WORTH):
                    self._add(within, counts)
        else:
            self._improve(within, within.start())

    def _improve(self, within: _Set, counts: tuple[int, ...]) -> None:
        best = self._add(within, counts)
        tried = {counts}
        is_better = True
        while is_better:
            is_better = False
            for changed in within.neighbours(counts):
                known = changed in tried or within.bound_s(changed) >= best * (1 - _WORTH)
                tried.add(changed)
                if not known and (found := self._add(within, changed)) < best * (1 - _WORTH):
                    counts, best, is_better = changed, found, True
                    break

    def _add(self, within: _Set, counts: tuple[int, ...]) -> float:
        makespan = within.makespan_s(counts)
        self.found.append(Counts(makespan, within.kinds, counts))
        self.found.sort()
        del self.found[_KEPT:]
        self.best_s = min(self.best_s, makespan)
        return makespan


class _Set:
    """A set of kinds, and the prices that its counts have led to: each bounds all others."""

    def __init__(self, problem: Problem, kinds: tuple[int, ...]) -> None:
        self.kinds = kinds
        self.gpus = tuple(problem.gpus[k] for k in kinds)
        self._costs = [problem.costs[k] for k in kinds]
        self._num_gpus = problem.num_gpus
        self._prices = [Prices(tuple(map(float, self.gpus)), problem.gpu_s(kinds))]

    def bound_s(self, counts: Sequence[int]) -> float:
        """No division of the work over these replicas ends sooner."""
        return max(prices.bound_s(counts) for prices in self._prices)

    def makespan_s(self, counts: Sequence[int]) -> float:
        """Divides the work, and keeps the prices."""
        division = divide(self._costs, counts)
        self._prices.append(division.prices)
        return division.makespan_s

    def start(self) -> tuple[int, ...]:
        """Counts near those that the bound would have, with the rest given to the smallest."""
        loads = [0.0] * len(self.kinds)
        for own in zip(*self._costs, strict=True):
            priced = [g * s for g, s in zip(self.gpus, own, strict=True)]
            kind = priced.index(min(priced))
            loads[kind] += priced[kind]
        scale = self._num_gpus / sum(loads)
        counts = [max(1, int(load * scale / g)) for load, g in zip(loads, self.gpus, strict=True)]
        while (over := self._free(counts)) < 0:
            kind = max(range(len(counts)), key=lambda k: (counts[k] > 1, counts[k] * self.gpus[k]))
            counts[kind] -= min(counts[kind] - 1, -(over // self.gpus[kind]))
        return self._filled(counts)

    def neighbours(self, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Counts with some replicas of one kind given up for others."""
        pairs = itertools.permutations(range(len(counts)), 2)
        for (giver, taker), given in itertools.product(list(pairs), (1, 2, 4, 8)):
            freed = given * self.gpus[giver] + self._free(counts)
            if counts[giver] > given and freed >= self.gpus[taker]:
                changed = list(counts)
                changed[giver] -= given
                changed[taker] += freed // self.gpus[taker]
                yield self._filled(changed)

    def _free(self, counts: Sequence[int]) -> int:
        return self._num_gpus - sum(n * g for n, g in zip(counts, self.gpus, strict=True))

    def _filled(self, counts: list[int]) -> tuple[int, ...]:
        """Gives GPUs that are left to the largest kinds that they are enough for."""
        for kind in sorted(range(len(counts)), key=lambda k: -self.gpus[k]):
            counts[kind] += self._free(counts) // self.gpus[kind]
        return tuple(counts)


def _all_counts(gpus: Sequence[int], num_gpus: int) -> Iterator[tuple[int, ...]]:
    """All counts of at least 1 that leave no GPU to another replica."""
    first, rest = gpus[0], gpus[1:]
    most = (num_gpus - sum(rest)) // first
    if not rest:
        if most >= 1:
            yield (most,)
        return
    for count in range(1, most + 1):
        for others in _all_counts(rest, num_gpus - count * first):
            left = num_gpus - count * first - sum(n * g for n, g in zip(others, rest, strict=True))
            if left < first:
                yield (count, *others)


MARGIN = 0.03
"""Share of the time that unlike replicas must save: the planner's own median error is 2.5 %."""
_ALIKE, _UNLIKE = 3, 5
"""Deployments to run through the dispatcher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedDeployment:
    deployment: Deployment
    replicas: Replicas
    fluid_s: float
    """Seconds for all jobs' batches if sequences could be divided."""
    gap: float
    """Share by which `fluid_s` exceeds the bound of all deployments."""
    sampled: Sampled | None
    """The dispatcher's result for drawn rounds; None where single sequences do not matter."""

    @property
    def is_alike(self) -> bool:
        return len(self.replicas.kinds) == 1

    @property
    def has_recompute_by_rows(self) -> bool:
        """True if `run.recompute` is to be auto, which all replicas then have."""
        return any(kind.by_rows for kind in self.replicas.kinds)

    @property
    def label(self) -> str:
        """The deployment's short form; with recompute by rows `auto` stands in it."""
        if not self.has_recompute_by_rows:
            return str(self.deployment)
        return str(self.deployment).replace("/full", "/auto").replace("/selective", "/auto")

    @property
    def time_s(self) -> float:
        """Predicted time of all jobs' batches, without gradient sums and optimizer steps."""
        return self.fluid_s if self.sampled is None else self.fluid_s / self.sampled.efficiency


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentResult:
    """Deployments of some GPUs, the one to take first."""

    ranked: tuple[RankedDeployment, ...]
    """The chosen one, then the others by speed; empty if no replica holds the longest sequence."""
    bound_s: float
    """No deployment takes less time for all jobs' batches, however sequences are divided."""
    tokens: float
    """Tokens of all jobs' batches."""
    num_kinds: int
    num_undominated: int

    @property
    def best(self) -> RankedDeployment | None:
        return self.ranked[0] if self.ranked else None


def deploy(
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    hardware: HardwareProfile,
    num_gpus: int,
    space: SearchSpace | None = None,
) -> DeploymentResult:
    """Finds the fastest replicas, alike or not, that use `num_gpus` GPUs within a space of kinds.

    Raises:
        ValueError: for jobs or numbers that cannot be planned for, or a base with routed experts.
    """
    check_jobs(jobs)
    refuse_experts(spec.experts, "the base of replicas of any kinds")
    if num_gpus < 1:
        raise ValueError(f"num_gpus must be at least 1, got {num_gpus}")
    space = space or SearchSpace()
    kinds, by_rows = all_kinds(Question(spec, jobs, hardware, num_gpus, space))
    classes, longest = length_classes(jobs), longest_of(jobs)
    most = space.micro_batch_tokens or most_rows(longest)
    one_tp = bool(spec.fp8_linears) or any(job.num_blocks > 1 for job in jobs)
    kept = _kept([kind for kind in kinds if kind.curve.budget <= most], classes, one_tp=one_tp)
    problem = _problem(kept, classes, num_gpus)
    bound_s = _problem([*kinds, *by_rows], classes, num_gpus).bound_s
    alike = _alike([*kinds, *by_rows], classes, num_gpus, longest)
    found = best_counts(problem) if kept else []
    unlike = [counts for counts in found if _is_whole(counts, problem, kept, jobs)]
    ranked = [
        _rank([kind], (count,), seconds, bound_s, jobs) for seconds, count, kind in alike[:_ALIKE]
    ]
    ranked += [
        _rank([kept[k] for k in own.kinds], own.counts, own.makespan_s, bound_s, jobs)
        for own in unlike[:_UNLIKE]
    ]
    return DeploymentResult(
        ranked=tuple(_ordered(ranked)),
        bound_s=bound_s,
        tokens=sum(job.batch_tokens for job in jobs),
        num_kinds=len(kinds),
        num_undominated=len(kept),
    )


def _kept(kinds: Sequence[Kind], classes: Sequence[LengthClass], *, one_tp: bool) -> list[Kind]:
    """The kinds worth mixing, of one TP size over an FP8 base and with block-diagonal adapters."""
    if not one_tp:
        return undominated(kinds, classes)
    sizes = {kind.plan.tp_size for kind in kinds}
    groups = [[kind for kind in kinds if kind.plan.tp_size == size] for size in sorted(sizes)]
    kept = [undominated(group, classes) for group in groups]
    return min(kept, key=lambda group: _problem(group, classes, 1).bound_s, default=[])


def _problem(kinds: Sequence[Kind], classes: Sequence[LengthClass], num_gpus: int) -> Problem:
    return Problem(
        gpus=tuple(kind.gpus for kind in kinds),
        costs=tuple(tuple(kind.seconds(classes)) for kind in kinds),
        num_gpus=num_gpus,
    )


def _alike(
    kinds: Sequence[Kind], classes: Sequence[LengthClass], num_gpus: int, longest: int
) -> list[tuple[float, int, Kind]]:
    """Time, number and kind of replicas of each kind that alone holds and uses everything."""
    found = [
        (sum(kind.seconds(classes)) * kind.gpus / num_gpus, num_gpus // kind.gpus, kind)
        for kind in kinds
        if kind.curve.budget >= longest and num_gpus % kind.gpus == 0
    ]
    return sorted(found, key=lambda entry: entry[0])


def _is_whole(
    found: Counts, problem: Problem, kinds: Sequence[Kind], jobs: Sequence[JobLoad]
) -> bool:
    """True if a deployment of several kinds uses all GPUs and holds evaluations too."""
    used = sum(problem.gpus[k] * n for k, n in zip(found.kinds, found.counts, strict=True))
    longest = max(kinds[k].curve.budget for k in found.kinds)
    return len(found.kinds) > 1 and used == problem.num_gpus and longest >= longest_of(jobs)


def _rank(
    kinds: Sequence[Kind],
    counts: Sequence[int],
    fluid_s: float,
    bound_s: float,
    jobs: Sequence[JobLoad],
) -> RankedDeployment:
    replicas = Replicas(kinds=tuple(kinds), counts=tuple(counts))
    return RankedDeployment(
        deployment=Deployment.of(kind.layout for kind in replicas.each),
        replicas=replicas,
        fluid_s=fluid_s,
        gap=fluid_s / bound_s - 1,
        sampled=sample_rounds(jobs, replicas),
    )


def _ordered(ranked: Sequence[RankedDeployment]) -> list[RankedDeployment]:
    """Fastest first, but alike replicas before unlike ones that are not faster by `MARGIN`."""
    ordered = sorted(ranked, key=lambda entry: entry.time_s)
    alike = next((entry for entry in ordered if entry.is_alike), None)
    if alike is None or ordered[0].time_s <= alike.time_s * (1 - MARGIN):
        return ordered
    return [alike, *(entry for entry in ordered if entry is not alike)]
