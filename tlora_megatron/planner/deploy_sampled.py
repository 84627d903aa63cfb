"""Runs the dispatcher on drawn rounds of a deployment: what single sequences make of its plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

from tlora_megatron.model.cp_dispatch import CpRates, share_among_teams
from tlora_megatron.model.dispatch import ReplicaRate, assign, predicted_ends_ps, share_out
from tlora_megatron.model.layout import ReplicaLayout
from tlora_megatron.model.micro_batches import cut
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import DEPTHS, Plan, RoundDepth
from tlora_megatron.planner.choices import CurveModel, replica_rate
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.deploy_kinds import (
    Kind,
    classes_of,
    divide,
    kind_by_rows,
    length_classes,
)
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.rounds.packer import drawn_rounds
from tlora_megatron.planner.workload import JobLoad

_ENOUGH = 0.985
"""Busy share at which deeper rounds are not looked for."""
_SEQUENCES, _MOST_SEQUENCES = 4096, 4096
_FEWEST_ROUNDS, _MOST_ROUNDS = 20, 50
_PICO = 1e-12


class Sampled(NamedTuple):
    busy_share: float
    """Share of all GPUs' time in which they compute, instead of waiting for the slowest replica."""
    efficiency: float
    """Time that the rounds' work takes if sequences can be divided, over the rounds' time."""
    depth: int
    num_rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    kinds: tuple[Kind, ...]
    counts: tuple[int, ...]

    @property
    def each(self) -> list[Kind]:
        """The kind of every replica."""
        pairs = zip(self.kinds, self.counts, strict=True)
        return [kind for kind, count in pairs for _ in range(count)]


def sample_rounds(jobs: Sequence[JobLoad], replicas: Replicas) -> Sampled | None:
    """Shares out rounds of drawn lengths at the least depth that keeps the replicas busy.

    None if a round holds so many sequences that single ones do not matter.
    """
    best = None
    room = sum(kind.curve.budget for kind in replicas.each)
    mean = sum(job.batch_tokens for job in jobs) / sum(job.batch_size for job in jobs)
    batches = sum(job.batch_size for job in jobs)
    if min(batches, room * DEPTHS[1] / mean) > _MOST_SEQUENCES:
        return None
    for depth in _depths(replicas):
        sequences = int(min(batches, depth * room / mean)) + 1
        rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, _SEQUENCES // sequences))
        found = _sample(jobs, replicas, depth, rounds)
        best = found if best is None or found.efficiency > best.efficiency else best
        if best.busy_share >= _ENOUGH:
            break
    return best


def _depths(replicas: Replicas) -> tuple[int, ...]:
    """Depths to try: four micro-batches a stage fill a pipeline, and unlike replicas want two."""
    stages = max(kind.plan.pp_size for kind in replicas.kinds)
    if stages > 1:
        return (4 * stages,)
    return DEPTHS if len(replicas.kinds) == 1 else DEPTHS[1:]


def _sample(jobs: Sequence[JobLoad], replicas: Replicas, depth: int, num_rounds: int) -> Sampled:
    each, drawn = replicas.each, list[int]()
    rates, gpus = [kind.rate for kind in each], [kind.gpus for kind in each]
    time_ps = busy_ps = 0
    for taken in itertools.islice(drawn_rounds(jobs, rates, depth), num_rounds):
        lengths = list(itertools.chain.from_iterable(taken))
        drawn += lengths
        own = _by_replica(lengths, rates)
        ends = [kind.round_ps(rows) for kind, rows in zip(each, own, strict=True)]
        time_ps += max(ends)
        busy_ps += sum(end * g for end, g in zip(ends, gpus, strict=True))
    classes = classes_of([(n, 1.0) for n in drawn])
    costs = [kind.seconds(classes) for kind in replicas.kinds]
    fluid_s = divide(costs, replicas.counts).makespan_s
    return Sampled(
        busy_share=busy_ps / (time_ps * sum(gpus)),
        efficiency=fluid_s / (time_ps * _PICO),
        depth=depth,
        num_rounds=num_rounds,
    )


def _by_replica(lengths: Sequence[int], rates: Sequence[ReplicaRate]) -> list[list[int]]:
    """The sequences of a round by the replica that gets them."""
    own: list[list[int]] = [[] for _ in rates]
    for length, replica in zip(lengths, assign(lengths, rates), strict=True):
        own[replica].append(length)
    return own


def saved_by_rows(
    spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan, hardware: HardwareProfile
) -> float | None:
    """Share of a plan's work that `run.recompute: auto` saves it, at the same budget of rows.

    None where one recompute is all that fits, and where micro-batches share one: in pipelines, and
    on ranks that share experts.
    """
    if plan.pp_size > 1 or plan.ep_size > 1 or plan.recompute == "none":
        return None
    curves = CurveModel(spec, jobs, hardware)
    memory = MemoryModel(spec, jobs, hardware)
    by_rows = kind_by_rows(memory, curves, plan, hardware.memory_bytes)
    if by_rows is None:
        return None
    classes = length_classes(jobs)
    fixed_s, found_s = (
        sum(kind.seconds(classes)) for kind in (Kind(plan, curves.curve(plan)), by_rows)
    )
    return 1 - found_s / fixed_s


_FEWEST_TEAM_ROUNDS, _MOST_TEAM_ROUNDS = 12, 64


class TeamsOutlook(NamedTuple):
    """Prediction for a plan with `parallel.cp_by_micro_batch`."""

    depth: RoundDepth
    """The `run.round_depth` that saves most."""
    saved: float
    """Share of the rounds' time without the key, at the depth that is best without it; sums of
    gradients and steps are not in it."""


def outlook_of_teams(
    spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan, hardware: HardwareProfile
) -> TeamsOutlook | None:
    """Shares drawn rounds out among teams of context-parallel ranks; None where there are none."""
    cp_size = plan.cp_size
    if cp_size == 1 or cp_size & (cp_size - 1) or plan.pp_size > 1:
        return None
    rates = CpRates(tuple(replica_rate(spec, jobs, own, hardware) for own in teams_of(plan)))
    time_of = partial(_time_of_work, jobs, rates, plan)
    without = min(time_of(depth, by_teams=False) for depth in DEPTHS)
    found = [TeamsOutlook(d, 1 - time_of(d, by_teams=True) / without) for d in DEPTHS]
    return max(found, key=lambda outlook: outlook.saved)


_Whole = TypeVar("_Whole", Plan, ReplicaLayout)


def teams_of(whole: _Whole) -> tuple[_Whole, ...]:
    """Teams of 1, 2, 4, ... context-parallel ranks of a replica, each with its share of rows."""
    rows, most = whole.micro_batch_tokens, whole.cp_size
    assert rows is not None, "the run's budget is filled in"
    sizes = [1 << power for power in range(most.bit_length())]
    return tuple(
        replace(whole, cp_size=size, micro_batch_tokens=max(1, rows * size // most))
        for size in sizes
    )


def _time_of_work(
    jobs: Sequence[JobLoad], rates: CpRates, plan: Plan, depth: int, *, by_teams: bool
) -> float:
    """Time of drawn rounds over that of their sequences on single ranks."""
    replicas = [rates.of(rates.cp_size)] * plan.dp_size
    time_ps = work_ps = sequences = 0
    for number, taken in enumerate(drawn_rounds(jobs, replicas, depth)):
        if number >= _MOST_TEAM_ROUNDS or (
            number >= _FEWEST_TEAM_ROUNDS and sequences >= _SEQUENCES
        ):
            break
        lengths = list(itertools.chain.from_iterable(taken))
        sequences += len(lengths)
        work_ps += sum(map(rates.of(1).sequence_ps, lengths))
        if not by_teams:
            shares = [
                [[lengths[i] for i in part] for part in share]
                for share in share_out(lengths, replicas)
            ]
            time_ps += max(predicted_ends_ps(shares, replicas))
            continue
        divided = (
            share_among_teams(rows, rates, lambda own, size: cut(own, rates.of(size).longest))
            for rows in _by_replica(lengths, replicas)
        )
        time_ps += max(itertools.chain.from_iterable(shares.ends_ps for shares in divided))
    return time_ps / work_ps
