"""Predicts what recompute by rows, and context parallelism by micro-batch, would save a plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tlora_megatron.model.cp_dispatch import CpRates, share_among_teams
from tlora_megatron.model.dispatch import assign, cut, predicted_ends_ps, share_out
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import DEPTHS, Plan, RoundDepth
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.cost.replica_rate import CurveModel, replica_rate
from tlora_megatron.planner.deploy_kinds import Kind, kind_by_rows, length_classes
from tlora_megatron.planner.deploy_sampled import drawn_rounds
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.workload import JobLoad


def saved_by_rows(
    spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan, hardware: HardwareProfile
) -> float | None:
    """Share of a plan's work that `run.recompute: auto` saves it, at the same budget of rows.

    Sums of gradients and steps are not in it. None where nothing is computed again, or one
    recompute is all that fits, and where micro-batches share one: in pipelines, and on ranks that
    share experts.
    """
    if plan.pp_size > 1 or plan.ep_size > 1 or plan.recompute == "none":
        return None
    curves = CurveModel(spec, jobs, Rates(hardware))
    memory = MemoryModel(spec, jobs, hardware)
    by_rows = kind_by_rows(memory, curves, plan, hardware.memory_bytes)
    if by_rows is None:
        return None
    classes = length_classes(jobs)
    fixed_s, found_s = (
        sum(kind.seconds(classes)) for kind in (Kind(plan, curves.curve(plan)), by_rows)
    )
    return 1 - found_s / fixed_s


_SEQUENCES = 4096
_FEWEST_ROUNDS, _MOST_ROUNDS = 12, 64


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
    rates = team_rates(spec, jobs, plan, hardware)
    time_of = partial(_time_of_work, jobs, rates, plan)
    without = min(time_of(depth, by_teams=False) for depth in DEPTHS)
    found = [TeamsOutlook(d, 1 - time_of(d, by_teams=True) / without) for d in DEPTHS]
    return max(found, key=lambda outlook: outlook.saved)


def team_rates(
    spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan, hardware: HardwareProfile
) -> CpRates:
    """Predicts the speeds of 1, 2, 4, ... context-parallel ranks of a plan's replica."""
    plans = [
        replace(
            plan,
            cp_size=size,
            micro_batch_tokens=max(1, plan.micro_batch_tokens * size // plan.cp_size),
        )
        for size in (1 << power for power in range(plan.cp_size.bit_length()))
    ]
    return CpRates(tuple(replica_rate(spec, jobs, own, hardware) for own in plans))


def _time_of_work(
    jobs: Sequence[JobLoad], rates: CpRates, plan: Plan, depth: int, *, by_teams: bool
) -> float:
    """Time of drawn rounds over that of their sequences on single ranks."""
    replicas = [rates.of(rates.cp_size)] * plan.dp_size
    time_ps = work_ps = sequences = 0
    for number, lengths in enumerate(drawn_rounds(jobs, replicas, depth)):
        if number >= _MOST_ROUNDS or (number >= _FEWEST_ROUNDS and sequences >= _SEQUENCES):
            break
        sequences += len(lengths)
        work_ps += sum(map(rates.of(1).sequence_ps, lengths))
        if not by_teams:
            shares = [
                [[lengths[i] for i in part] for part in share]
                for share in share_out(lengths, replicas)
            ]
            time_ps += max(predicted_ends_ps(shares, replicas))
            continue
        own: list[list[int]] = [[] for _ in replicas]
        for rows, replica in zip(lengths, assign(lengths, replicas).replicas, strict=True):
            own[replica].append(rows)
        divided = (share_among_teams(rows, rates, partial(_cut, rates)) for rows in own)
        time_ps += max(itertools.chain.from_iterable(shares.ends_ps for shares in divided))
    return time_ps / work_ps


def _cut(rates: CpRates, lengths: Sequence[int], size: int) -> list[list[int]]:
    return cut(lengths, rates.of(size).longest)
