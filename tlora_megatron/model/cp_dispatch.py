"""Chooses how many context-parallel ranks of a replica compute each of its sequences together.

A replica of C ranks divides into teams of C, C/2, ..., 1 neighbours. Long sequences go to wide
teams, short ones to narrow ones, where attention sends nothing. Every rank runs the micro-batches
of its widest team first, so that all ranks of a team come to each of its micro-batches together.
Whole numbers only: every process finds the same without a word to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlora_megatron.model.dispatch import ReplicaRate, deal
from tlora_megatron.model.micro_batches import largest_first

Cut = Callable[[Sequence[int], int], list[list[int]]]
"""From the rows of a team's sequences and its size to its micro-batches: places in the rows."""
_STEP = (7, 8)
"""Each time that is tried as the most for one sequence, over the one before."""
_MOST_STEPS = 24
"""Times that are tried; the last one is a twenty-fifth of the first."""


class CpTeam(NamedTuple):
    """Neighbouring context-parallel ranks of a replica that run a micro-batch together."""

    first_rank: int
    size: int

    def has(self, cp_rank: int) -> bool:
        """True if a context-parallel rank is one of them."""
        return self.first_rank <= cp_rank < self.first_rank + self.size


@dataclass(frozen=True, slots=True)
class CpRates:
    """The speeds of a replica's teams."""

    by_size: tuple[ReplicaRate, ...]
    """Those of teams of 1, 2, 4, ... ranks; the last one is the whole replica."""

    @property
    def cp_size(self) -> int:
        """Ranks of the replica."""
        return 1 << (len(self.by_size) - 1)

    @property
    def line(self) -> str:
        """The teams as users read them: `teams of 1 rank hold 8,192 rows, of 2 16,384`."""
        own = [f"{1 << place} {rate.longest:,}" for place, rate in enumerate(self.by_size)]
        first = f"teams of 1 rank hold {self.by_size[0].longest:,} rows"
        return ", of ".join([first, *own[1:]])

    def of(self, size: int) -> ReplicaRate:
        """Returns the speed of teams of so many ranks."""
        return self.by_size[size.bit_length() - 1]

    def least_size(self, rows: int, within_ps: int) -> int:
        """Returns the size of the smallest team that ends a sequence in time, else of them all."""
        for place, rate in enumerate(self.by_size):
            if rows <= rate.longest and rate.sequence_ps(rows) <= within_ps:
                return 1 << place
        return self.cp_size


class TeamShares(NamedTuple):
    """One replica's micro-batches, and the predicted time of each of its ranks."""

    teams: tuple[CpTeam, ...]
    """The ranks of each micro-batch, wide teams before narrow ones."""
    places: tuple[tuple[int, ...], ...]
    """The sequences of each micro-batch."""
    ends_ps: tuple[int, ...]


def share_among_teams(lengths: Sequence[int], rates: CpRates, cut: Cut) -> TeamShares:
    """Gives every sequence of a replica to a team so that its ranks end early, and together.

    For several times that one sequence may take at most, each goes to the smallest team that is as
    fast as that; the widest teams are filled first, longest first to the team that ends first. The
    best of these stands, or all sequences by all ranks if nothing ends before that.
    """
    tried = (_shared(lengths, sizes, rates, cut) for sizes in _choices(lengths, rates))
    return min(tried, key=lambda shares: max(shares.ends_ps))


def _choices(lengths: Sequence[int], rates: CpRates) -> Iterator[list[int]]:
    """Yields team sizes for the sequences; all ranks for all of them come first."""
    together = before = [rates.cp_size] * len(lengths)
    yield together
    within_ps = max((rates.of(1).sequence_ps(rows) for rows in lengths), default=0)
    for _ in range(_MOST_STEPS):
        sizes = [rates.least_size(rows, within_ps) for rows in lengths]
        if sizes == together:
            return
        if sizes != before:
            yield sizes
        before, within_ps = sizes, within_ps * _STEP[0] // _STEP[1]


def _shared(lengths: Sequence[int], sizes: Sequence[int], rates: CpRates, cut: Cut) -> TeamShares:
    order = largest_first(lengths)
    size, ends = rates.cp_size, [0]
    teams: list[CpTeam] = []
    places: list[tuple[int, ...]] = []
    while size:
        own = deal([i for i in order if sizes[i] == size], lengths, rates.of(size), ends)
        for number, mine in enumerate(own):
            parts = cut([lengths[i] for i in mine], size)
            teams += [CpTeam(number * size, size)] * len(parts)
            places += [tuple(mine[i] for i in part) for part in parts]
            ends[number] += rates.of(size).fixed_ps * len(parts)
        size //= 2
        if size:
            ends = [end for end in ends for _ in range(2)]
    return TeamShares(tuple(teams), tuple(places), tuple(ends))


def team_ends_ps(shares: Sequence[tuple[CpTeam, Sequence[int]]], rates: CpRates) -> list[int]:
    """Predicted time of each rank of a replica, from the rows of every micro-batch's sequences."""
    ends = [0] * rates.cp_size
    for team, lengths in shares:
        rate = rates.of(team.size)
        took = rate.fixed_ps + sum(map(rate.sequence_ps, lengths))
        for rank in range(team.first_rank, team.first_rank + team.size):
            ends[rank] += took
    return ends
