"""The steps that each process of a group takes for a collective over peer memory, as pure lists.

Every process has, for each lane, an *area* of memory that all of them can reach: a slot for each
sender and one for the sum, and two sets of flags, one a phase. A collective is, in rounds that fit
a slot:

- all-reduce: copy each process's slice of x into its area (the slot of the sender), phase 0, sum
  the slices in rank order, phase 1, copy the sums out of the owners' areas;
- reduce-scatter: the same without the last copies;
- all-gather: own rows into the own area, phase 0, copy the others' rows out of their areas,
  phase 1.

In a phase a process raises its flag at every other, waits for all of theirs, and lowers those.

Why nothing is overwritten too early and no flag is lost, whatever the order of collectives in a
lane: each round has phase 0 and then phase 1, and "X before Y" holds along a stream.

1. Flags. r raises its flag of phase 1 at p after it saw p's of phase 0; it raises that of the next
   phase 0 after it saw p's of phase 1. p raises one flag after it lowered what it had waited for
   before. So r never raises a flag that p has not yet lowered.
2. A sender's slot at p. r fills it before phase 0. p reads it before it raises phase 1, and r fills
   it anew after it has seen that.
3. The sum's slot at r. p reads it after phase 1, and raises its flag of the next phase 0
   afterwards; r writes the slot anew after it has seen that (an all-reduce's sum follows phase 0).
4. Own rows at r (all-gather). r writes them before phase 0. p reads them between its two phases,
   and r passes phase 1, hence any later write, after it has seen p's flag of phase 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

SLOT_ALIGNMENT = 512
_SLICE_ALIGNMENT = 16
"""Bytes that the sum reads at once."""

Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]


class Place(NamedTuple):
    """A byte of memory."""

    base: int | Literal["x", "out"]
    """The operand, the result, or the rank of the process whose area it is in."""
    offset: int


class Copy(NamedTuple):
    """Copies bytes from or to another process's area."""

    source: Place
    target: Place
    num_bytes: int


class Exchange(NamedTuple):
    """Raises this process's flags of a phase and waits for all others'."""

    phase: Literal[0, 1]


class Sum(NamedTuple):
    """Writes own bytes plus, unless `alone`, all others' slots, in rank order, to two places."""

    own: Place
    target: Place
    also: Place | None
    num_bytes: int
    alone: bool = False


Step: TypeAlias = Copy | Exchange | Sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One process's part in a lane."""

    rank: int
    size: int
    slot_bytes: int
    """A multiple of `SLOT_ALIGNMENT`."""

    @property
    def area_bytes(self) -> int:
        """Bytes of a slot for each sender and one for the sum."""
        return (self.size + 1) * self.slot_bytes

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks in the order of copies: at each turn every process has another target."""
        if self.size & (self.size - 1) == 0:
            return tuple(self.rank ^ turn for turn in range(1, self.size))
        return tuple((self.rank + turn) % self.size for turn in range(1, self.size))

    def slot(self, of: int, sender: int) -> Place:
        """Returns the slot of `sender` (or `size`: of the sum) in the area of process `of`."""
        return Place(of, sender * self.slot_bytes)

    def steps(self, operation: Operation, num_bytes: int) -> list[Step]:
        """Returns the steps of a collective.

        Args:
            num_bytes: of the whole tensor, gathered or to be summed; `size` must divide them,
                except for an all-reduce.
        """
        make = {
            "all_reduce": self._all_reduce,
            "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather,
        }
        return list(make[operation](num_bytes))

    def _all_reduce(self, num_bytes: int) -> Iterator[Step]:
        slice_bytes = _rounded(-(-num_bytes // self.size), _SLICE_ALIGNMENT)
        for begin, room in _rounds(slice_bytes, self.slot_bytes):
            starts = [rank * slice_bytes + begin for rank in range(self.size)]
            # The last slices may be short, or empty.
            sizes = [max(0, min(room, num_bytes - start)) for start in starts]
            yield from self._scatter(starts, sizes)
            yield Exchange(0)
            start, size = starts[self.rank], sizes[self.rank]
            if size:
                total = self.slot(self.rank, self.size)
                yield Sum(Place("x", start), total, Place("out", start), size)
            yield Exchange(1)
            for peer in self.peers:
                if sizes[peer]:
                    source = self.slot(peer, self.size)
                    yield Copy(source, Place("out", starts[peer]), sizes[peer])

    def _reduce_scatter(self, num_bytes: int) -> Iterator[Step]:
        slice_bytes = num_bytes // self.size
        for begin, size in _rounds(slice_bytes, self.slot_bytes):
            starts = [rank * slice_bytes + begin for rank in range(self.size)]
            yield from self._scatter(starts, [size] * self.size)
            yield Exchange(0)
            yield Sum(Place("x", starts[self.rank]), Place("out", begin), None, size)
            yield Exchange(1)

    def _all_gather(self, num_bytes: int) -> Iterator[Step]:
        slice_bytes = num_bytes // self.size
        for begin, size in _rounds(slice_bytes, self.slot_bytes):
            own = Place("out", self.rank * slice_bytes + begin)
            slot = self.slot(self.rank, self.rank)
            yield Sum(Place("x", begin), slot, own, size, alone=True)
            yield Exchange(0)
            for peer in self.peers:
                target = Place("out", peer * slice_bytes + begin)
                yield Copy(self.slot(peer, peer), target, size)
            yield Exchange(1)

    def _scatter(self, starts: list[int], sizes: list[int]) -> Iterator[Step]:
        for peer in self.peers:
            if sizes[peer]:
                target = self.slot(peer, self.rank)
                yield Copy(Place("x", starts[peer]), target, sizes[peer])


def slot_bytes(max_bytes: int, size: int) -> int:
    """Returns a slot's bytes, such that a collective of up to `max_bytes` takes one round."""
    return _rounded(max(1, -(-max_bytes // size)), SLOT_ALIGNMENT)


def _rounds(num_bytes: int, room: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, num_bytes, room):
        yield begin, min(room, num_bytes - begin)


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
