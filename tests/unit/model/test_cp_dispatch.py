"""The ranks of a replica share its sequences: long ones together, short ones apart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tlora_megatron.model.cp_dispatch import (
    CpRates,
    CpTeam,
    TeamShares,
    share_among_teams,
    team_ends_ps,
)
from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.model.dispatch import cut


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


def test_nothing_is_predicted_to_end_later_than_by_all_ranks() -> None:
    draw, speeds = random.Random(0), rates(4)
    for _ in range(50):
        lengths = [draw.randrange(1, 256) for _ in range(draw.randrange(1, 12))]
        together = [[(CpTeam(0, 4), [lengths[i] for i in part]) for part in cut(lengths, 256)]]
        assert max(shared(lengths, speeds).ends_ps) <= max(team_ends_ps(together[0], speeds))


def test_teams_are_told() -> None:
    assert rates(4).line == "teams of 1 rank hold 64 rows, of 2 128, of 4 256"


def test_a_sequence_alone_is_shared() -> None:
    assert shared([50], rates(4)).teams == (CpTeam(0, 4),)


def test_no_sequences_make_no_micro_batches() -> None:
    assert shared([], rates(2)) == TeamShares((), (), (0, 0))
