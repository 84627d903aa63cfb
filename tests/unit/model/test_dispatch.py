"""Sequences are shared out: among replicas by time, within budgets, and among ranks of a
replica.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.training.packing.test_packing import queues_of
from tlora_megatron.model.cp_dispatch import (
    CpRates,
    CpTeam,
    TeamShares,
    share_among_teams,
    team_ends_ps,
)
from tlora_megatron.model.dispatch import ReplicaRate, _Unlike, admit, assign, turns
from tlora_megatron.model.micro_batches import cut, cut_evenly, largest_first
from tlora_megatron.training.packing.portions import fill_bins

KINDS = (
    ReplicaRate(token_ps=110_000_000, square_ps=6000, longest=6144),
    ReplicaRate(token_ps=58_000_000, square_ps=3100, longest=12288),
    ReplicaRate(token_ps=31_000_000, square_ps=1600, longest=16384),
    ReplicaRate(token_ps=17_000_000, square_ps=850, longest=65536),
)
"""Replicas of an 8B model on 1, 2, 4 and 8 GPUs, about."""
fast = settings(max_examples=60, deadline=None)
QUEUES = st.lists(st.lists(st.integers(1, 40), max_size=8), min_size=1, max_size=5)
FEW = st.lists(st.integers(1, 6000), max_size=40)


def lengths_of(draw: random.Random, count: int, longest: int) -> list[int]:
    means = [draw.uniform(200, 4000) for _ in range(6)]
    drawn = (draw.lognormvariate(math.log(draw.choice(means)) - 0.3, 0.8) for _ in range(count))
    return [min(longest, max(8, int(rows))) for rows in drawn]


@given(QUEUES, st.integers(0, 9), st.integers(1, 6))
@fast
def test_a_round_admits_what_packing_by_tokens_would_hold(
    queues: list[list[int]], first_slot: int, count: int
) -> None:
    left = [sorted(queue, reverse=True) for queue in queues]
    taken = admit(left, first_slot=first_slot, rooms=[40] * count)
    _, rest = fill_bins(
        queues_of(left), capacity=40, dp_size=count, pp_size=1, first_slot=first_slot
    )
    assert [len(queue) for queue in rest] == [
        len(queue) - n for queue, n in zip(left, taken, strict=True)
    ]


@given(QUEUES)
@fast
def test_nobody_starves(queues: list[list[int]]) -> None:
    left = [sorted(queue, reverse=True) for queue in queues]
    for number in range(len(queues)):
        taken = admit(left, first_slot=number, rooms=[1, 40])
        left = [queue[count:] for queue, count in zip(left, taken, strict=True)]
        assert not queues[number] or len(left[number]) < len(queues[number])


@given(FEW, st.integers(1, 9))
@fast
def test_among_alike_replicas_the_longest_goes_to_the_first(lengths: list[int], count: int) -> None:
    found = assign(lengths, [KINDS[0]] * count)
    ends = [(0, replica) for replica in range(count)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        end, replica = heapq.heappop(ends)
        assert found[i] == replica
        heapq.heappush(ends, (end + KINDS[0].sequence_ps(lengths[i]), replica))


@pytest.mark.parametrize("seed", range(40))
def test_unlike_replicas_end_within_2_per_cent_of_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    kinds = draw.sample(KINDS, draw.randint(2, 4))
    rates = [kind for kind in kinds for _ in range(draw.randint(1, 6))]
    longest = min(16384, max(kind.longest for kind in kinds))
    lengths = lengths_of(draw, draw.randint(40, 90) * len(rates), longest)
    found = assign(lengths, rates)
    assert found == assign(list(lengths), list(rates))
    least = bound(lengths, rates)
    assert least <= makespan(lengths, rates, found) <= 1.02 * least


def bound(lengths: list[int], rates: list[ReplicaRate]) -> int:
    return _Unlike(lengths, largest_first(lengths), rates).find_prices()[1]


def makespan(lengths: list[int], rates: list[ReplicaRate], replicas: list[int]) -> int:
    ends = [0] * len(rates)
    for rows, replica in zip(lengths, replicas, strict=True):
        assert rows <= rates[replica].longest
        ends[replica] += rates[replica].sequence_ps(rows)
    return max(ends)


def test_the_bound_is_below_the_best_of_all_assignments() -> None:
    draw = random.Random(1)
    for _ in range(30):
        rates = [draw.choice(KINDS) for _ in range(2)] + [KINDS[3]]
        lengths = [draw.randint(1, 9000) for _ in range(6)]
        best = min(_makespans(lengths, rates))
        found = makespan(lengths, rates, assign(lengths, rates))
        assert bound(lengths, rates) <= best <= found


def _makespans(lengths: list[int], rates: list[ReplicaRate]) -> list[int]:
    states = {(0,) * len(rates)}
    for rows in lengths:
        states = {
            tuple(end + (r == j) * rate.sequence_ps(rows) for j, end in enumerate(ends))
            for ends in states
            for r, rate in enumerate(rates)
            if rows <= rate.longest
        }
    return [max(ends) for ends in states]


def test_a_sequence_that_no_replica_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be at most 12288 rows.*got 12289"):
        assign([5, 12289], KINDS[:2])


@given(FEW, st.integers(6000, 20000))
@fast
def test_cuts_keep_the_budget_and_every_sequence(lengths: list[int], budget: int) -> None:
    parts = cut(lengths, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    rows = [sum(lengths[i] for i in part) for part in parts]
    assert all(0 < r <= budget for r in rows)
    assert rows == sorted(rows, reverse=True)
    # First fit leaves at most one micro-batch half empty; evened out, none need be full.
    assert len(parts) <= 1 + 2 * sum(lengths) // budget
    drawn = random.Random(0).sample(lengths, len(lengths))
    kinds = [sorted(lengths[i] for i in part) for part in parts]
    assert kinds == [sorted(drawn[i] for i in part) for part in cut(drawn, budget)]


def test_cuts_are_even() -> None:
    assert [len(part) for part in cut([100] * 12, 500)] == [4, 4, 4]
    assert cut_evenly([9, 9], 1, 10) is None
    assert cut_evenly([], 2, 10) == [[], []]


def test_turns_are_longest_first_among_alike_replicas_and_mixed_among_unlike_ones() -> None:
    alike = [ReplicaRate(token_ps=1, square_ps=0, longest=100)] * 2
    unlike = [*alike, ReplicaRate(token_ps=2, square_ps=0, longest=50)]
    lengths = [*range(1, 65)]
    assert [lengths[i] for i in turns(lengths, alike)] == lengths[::-1]
    mixed = [lengths[i] for i in turns(lengths, unlike)]
    assert sorted(mixed) == lengths
    for count in (8, 16, 32):
        assert sum(mixed[:count]) / count == pytest.approx(32.5, rel=0.15)
    assert mixed[0] == 64
    assert turns([], unlike) == []
    assert turns([5], unlike) == [0]


def rates(cp_size: int, budget: int = 64, exchange: int = 20) -> CpRates:
    """Each rank computes at one speed; ranks that share a row lose time with exchanges."""
    sizes = [1 << power for power in range(cp_size.bit_length())]
    return CpRates(
        tuple(
            ReplicaRate(
                token_ps=200 // size + (size > 1) * exchange,
                square_ps=8 // size,
                fixed_ps=5,
                longest=budget * size,
            )
            for size in sizes
        )
    )


def shared(lengths: Sequence[int], speeds: CpRates) -> TeamShares:
    return share_among_teams(lengths, speeds, lambda rows, size: cut(rows, speeds.of(size).longest))


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_every_sequence_runs_once_in_a_team_that_holds_it(cp_size: int) -> None:
    draw, speeds = random.Random(cp_size), rates(cp_size)
    for _ in range(50):
        lengths = [
            min(64 * cp_size, 1 + int(4 * draw.paretovariate(0.8)))
            for _ in range(draw.randrange(1, 40))
        ]
        found = shared(lengths, speeds)
        assert Counter(i for part in found.places for i in part) == Counter(range(len(lengths)))
        for team, places in zip(found.teams, found.places, strict=True):
            assert team.first_rank % team.size == 0
            assert 0 < sum(lengths[i] for i in places) <= speeds.of(team.size).longest
        assert [t.size for t in found.teams] == sorted((t.size for t in found.teams), reverse=True)
        by_team = [[lengths[i] for i in places] for places in found.places]
        assert team_ends_ps(list(zip(found.teams, by_team, strict=True)), speeds) == list(
            found.ends_ps
        )
        assert found == shared(lengths, speeds)


def test_short_ones_run_apart_and_the_long_one_together() -> None:
    found = shared([100, 10, 10, 10, 10], rates(2))
    assert found.teams == (CpTeam(0, 2), CpTeam(0, 1), CpTeam(1, 1))
    assert found.places == ((0,), (1, 3), (2, 4))
    assert shared([50], rates(4)).teams == (CpTeam(0, 4),)
    assert shared([], rates(2)) == TeamShares((), (), (0, 0))
    assert rates(4).line == "teams of 1 rank hold 64 rows, of 2 128, of 4 256"


def test_nothing_is_predicted_to_end_later_than_by_all_ranks() -> None:
    draw, speeds = random.Random(0), rates(4)
    for _ in range(50):
        lengths = [draw.randrange(1, 256) for _ in range(draw.randrange(1, 12))]
        together = [[(CpTeam(0, 4), [lengths[i] for i in part]) for part in cut(lengths, 256)]]
        assert max(shared(lengths, speeds).ends_ps) <= max(team_ends_ps(together[0], speeds))
