"""Chooses a deployment: replicas of one kind or several, and how many of each.

Kinds that another replaces are left out, counts are found against a bound, and the best are run
through the dispatcher on drawn rounds. Alike replicas are always among them, and unlike ones must
beat them by `MARGIN`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tlora_megatron.model.experts import refuse_experts
from tlora_megatron.model.replicas.deployment import Deployment
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.deploy.counts import Counts, Problem, best_counts
from tlora_megatron.planner.deploy.kinds import (
    Kind,
    LengthClass,
    all_kinds,
    kinds_by_rows,
    length_classes,
    longest_of,
    most_rows,
    undominated,
)
from tlora_megatron.planner.deploy.sampled import Replicas, Sampled, sample_rounds
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.space import SearchSpace
from tlora_megatron.planner.workload import JobLoad, check_jobs

MARGIN = 0.03
"""Share of the time that unlike replicas must save: the planner's own median error is 2.5 %."""
_ALIKE, _UNLIKE = 3, 5
"""Deployments to run through the dispatcher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedDeployment:
    """A deployment with its predicted speed."""

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
        """True if all replicas are of one kind."""
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
        """The deployment to take."""
        return self.ranked[0] if self.ranked else None


def deploy(
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    hardware: HardwareProfile,
    num_gpus: int,
    space: SearchSpace | None = None,
) -> DeploymentResult:
    """Finds the fastest replicas, alike or not, that use `num_gpus` GPUs.

    Args:
        space: what kinds must keep to.

    Raises:
        ValueError: for jobs or numbers that cannot be planned for, or a base with routed experts.
    """
    check_jobs(jobs)
    refuse_experts(spec.experts, "the base of replicas of any kinds")
    if num_gpus < 1:
        raise ValueError(f"num_gpus must be at least 1, got {num_gpus}")
    kinds = all_kinds(spec, jobs, hardware, num_gpus, space or SearchSpace())
    classes, longest = length_classes(jobs), longest_of(jobs)
    most = (space and space.micro_batch_tokens) or most_rows(longest)
    one_tp = bool(spec.fp8_linears) or any(job.num_blocks > 1 for job in jobs)
    kept = _kept([kind for kind in kinds if kind.curve.budget <= most], classes, one_tp=one_tp)
    problem = _problem(kept, classes, num_gpus)
    by_rows = kinds_by_rows(spec, jobs, hardware, num_gpus, space or SearchSpace())
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
    """The kinds worth mixing.

    Args:
        one_tp: they must have one TP size, as over an FP8 base and with block-diagonal adapters.
    """
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
