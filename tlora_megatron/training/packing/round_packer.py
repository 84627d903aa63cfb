"""Packs one round: which items this rank runs, and their rows, padding and nano-batches."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from tlora_megatron.model.cp_dispatch import CpRates, CpTeam
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano_cuts import CutDocuments
from tlora_megatron.training.packing.nano_batch_packer import NanoBatchPacker
from tlora_megatron.training.packing.packing import (
    Item,
    MicroBatch,
    PackedBatch,
    Placed,
    Round,
    RoundShape,
    SplitBatch,
    fill_bins,
    pack,
    round_up,
)
from tlora_megatron.training.packing.portions import (
    ReplicaRoom,
    RoundRule,
    cut_round,
    fill_by_time,
    fill_with_portions,
    form_teams,
    with_recompute,
)


class FilledRound(NamedTuple):
    """One round before it is packed; the same on all ranks."""

    round: Round
    """The items of every data-parallel replica."""
    left: list[list[Item]]
    """Each slot's items that did not fit."""


class PackedRound(NamedTuple):
    """One round, packed."""

    round: Round
    """The items of every data-parallel replica; the same on all ranks."""
    left: list[list[Item]]
    """Each slot's items that did not fit."""
    micro_batches: list[MicroBatch]
    """This rank's; in a pipeline all with equally many rows."""
    contents: list[tuple[Placed, ...]]
    """The items that have rows in each of this rank's micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPacker:
    """Packs a round from the queues of all slots."""

    groups: ParallelGroups
    micro_batch_tokens: int
    """Token budget of one micro-batch, over its context-parallel ranks."""
    shape: RoundShape
    active: tuple[bool, ...]
    """False for each slot that holds a placeholder."""
    dropout_keys: tuple[int, ...]
    """One for each slot; none when evaluating."""
    num_nano_batches: int
    """Most nano-batches of a micro-batch."""
    cut: CutDocuments
    """Chooses where a micro-batch is cut into nano-batches."""
    portion_tokens: tuple[int | None, ...] = ()
    """Tokens of a portion, by slot, see `packing.portions`; None = whatever room there is."""
    rule: RoundRule | None = None
    """Shares training rounds out by predicted time, and evaluations over unlike replicas; None =
    balances tokens."""
    cp_rates: CpRates | None = None
    """Shares a replica's part of a round out among teams of its context-parallel ranks; None = all
    of them run all micro-batches."""

    def pack_round(self, queues: Sequence[list[Item]], *, first_slot: int) -> PackedRound:
        """Fills the round's micro-batches from the queues and packs this rank's."""
        return self.pack_filled(self.fill_round(queues, first_slot=first_slot))

    def fill_round(self, queues: Sequence[list[Item]], *, first_slot: int) -> FilledRound:
        """Chooses the round's items and the micro-batch of each; the device is not needed for it.

        The same on every rank.
        """
        filled, left = self._fill(queues, first_slot)
        if self.cp_rates is not None:
            return FilledRound(form_teams(filled, self.cp_rates, self._recompute), left)
        if self._recompute is not None and self.groups.most_stages == 1:
            filled = cut_round(filled, self._recompute, self._nano_padding)
        return FilledRound(filled, left)

    def pack_filled(self, filled: FilledRound) -> PackedRound:
        """Packs this rank's micro-batches of a round."""
        mine, teams = filled.round.of_rank(self.groups.dp_rank, self.groups.cp_rank)
        contents = [self._with_rows(placed) for placed in mine]
        if not teams:
            return PackedRound(*filled, self.pack(mine), contents)
        packed = [self._pack_of_team(*pair) for pair in zip(contents, teams, strict=True)]
        return PackedRound(*filled, packed, contents)

    def _fill(
        self, queues: Sequence[list[Item]], first_slot: int
    ) -> tuple[Round, list[list[Item]]]:
        """Fills the micro-batches of all replicas."""
        asked, stages = self.shape.asked_micro_batches(), self.groups.most_stages
        is_unlike = self.groups.deployment is not None
        rule = self.rule if self.dropout_keys or is_unlike else None
        has_portions = bool(self.dropout_keys) and any(self.portion_tokens)
        if rule is not None and not has_portions:
            return fill_by_time(queues, self._within_capacity(rule, queues), first_slot=first_slot)
        assert has_portions or not is_unlike, "unlike replicas have a rule"
        fill = fill_bins
        if has_portions:
            rooms = self._rooms()
            fill = partial(fill_with_portions, portion_tokens=self.portion_tokens, rooms=rooms)
            if rule is not None and stages == 1:
                asked = rule.portion_micro_batches(queues)
        return fill(
            queues,
            capacity=self._capacity(queues),
            dp_size=self.groups.layout.dp_size,
            pp_size=stages,
            first_slot=first_slot,
            num_micro_batches=asked,
        )

    def _within_capacity(self, rule: RoundRule, queues: Sequence[Sequence[Item]]) -> RoundRule:
        """The rule with what a micro-batch may hold, where pipelines recompute by rows."""
        if self.groups.deployment is not None or self.groups.layout.pp_size == 1:
            return rule
        return rule.within(self._capacity(queues))

    def counts_of_a_round(
        self, queues: Sequence[Sequence[Item]], micro_batches: int | None = None
    ) -> list[int]:
        """Counts the items of each queue that could have room in a round.

        Args:
            micro_batches: at most so many of every replica, for all queues together; at least one
                item goes. None = each queue alone could fill the round.
        """
        if micro_batches is None:
            return [self._most_of_a_round(queue) for queue in queues]
        room, counts = sum(self._budgets) * micro_batches, []
        for queue in queues:
            ends = list(accumulate(item.length for item in queue))
            counts.append(bisect_right(ends, room))
            if counts[-1]:
                room -= ends[counts[-1] - 1]
        if not any(counts):
            first = next(index for index, queue in enumerate(queues) if queue)
            counts[first] = 1
        return counts

    def _most_of_a_round(self, queue: Sequence[Item]) -> int:
        """Counts the items of a queue that could fill a round alone."""
        most = self.shape.asked_micro_batches() or 4 * self.groups.most_stages
        room = sum(self._budgets) * most
        for count, item in enumerate(queue):
            if room <= 0:
                return count
            room -= item.length
        return len(queue)

    def pack(self, bins: Sequence[Sequence[Placed]]) -> list[MicroBatch]:
        """Packs a micro-batch for each bin, in a pipeline all padded to one length.

        Elsewhere each has its own rows: with the fullest one's, each would cost as much as that. A
        pipeline's stages would have to tell each other every length before every hop, and its time
        follows its longest micro-batch in any case.

        A micro-batch that runs whole has the kernels of one in nano-batches: which of the two a
        job's rows are in depends on its neighbours, and its bits must not.
        """
        alone = self.groups.layout.pp_size == 1 and not self.shape.fills_budget
        if alone and len(bins) > 1:
            return [micro_batch for placed in bins for micro_batch in self.pack([placed])]
        contents = [self._with_rows(placed) for placed in bins]
        num_tokens = self._num_rows(contents)
        everyone = CpTeam(0, self.groups.layout.cp_size)
        packed = [
            self._pack(placed, num_tokens, everyone, num_parts=self.num_nano_batches)
            for placed in contents
        ]
        splits: Sequence[SplitBatch | None] = [None] * len(packed)
        if self.num_nano_batches > 1:
            packer = self._nano_batch_packer()
            splits = packer.pack(bins, lambda placed: self._has_rows(placed.slot))
        found = [MicroBatch(*pair) for pair in zip(packed, splits, strict=True)]
        table = self._recompute
        return found if table is None else [with_recompute(own, table) for own in found]

    def _pack_of_team(self, placed: Sequence[Placed], team: CpTeam) -> MicroBatch:
        """Packs a micro-batch that some of the replica's context-parallel ranks share."""
        cp_size = self.groups.layout.cp_size
        rows = sum(p.item.length for p in placed)
        num_tokens = round_up(max(rows, 1), row_multiple(self.groups) // cp_size * team.size)
        made, table = MicroBatch(self._pack(placed, num_tokens, team)), self._recompute
        return made if table is None else with_recompute(made, table, cp_size)

    @property
    def _recompute(self) -> RecomputeTable | None:
        return self.shape.recompute if self.dropout_keys else None

    def _capacity(self, queues: Sequence[Sequence[Item]]) -> int:
        """Tokens that a micro-batch may hold.

        All its rows, or fewer where their number is fixed and nano-batches need some for their
        padding, as long as every sequence still fits.
        """
        longest = max((item.length for queue in queues for item in queue), default=0)
        if self._recompute is not None and self.groups.layout.pp_size > 1:
            return self._lightest_capacity(self._recompute, longest)
        if not self.shape.fills_budget or self.num_nano_batches == 1:
            return self.micro_batch_tokens
        room = self.micro_batch_tokens - min(self._nano_padding, self.micro_batch_tokens // 8)
        return room if longest <= room else self.micro_batch_tokens

    def _lightest_capacity(self, table: RecomputeTable, longest: int) -> int:
        """Tokens of a pipeline's micro-batches, which are of one length, so of one recompute."""
        longest = max((longest, *(tokens or 0 for tokens in self.portion_tokens)))
        room = table.room_around(longest + self._nano_padding) - self._nano_padding
        return min(room, self.micro_batch_tokens)

    @property
    def _nano_padding(self) -> int:
        """Rows that the nano-batches of a micro-batch may be padded by."""
        return (self.num_nano_batches > 1) * self.num_nano_batches * (row_multiple(self.groups) - 1)

    def _with_rows(self, placed: Sequence[Placed]) -> tuple[Placed, ...]:
        return tuple(p for p in placed if self._has_rows(p.slot))

    def _has_rows(self, slot: int) -> bool:
        """False for placeholders, unless ranks share the rows of a micro-batch.

        Sequence and context parallelism divide rows among ranks by row number: without a
        placeholder's rows the others' sequences would be divided elsewhere, and their gradients
        rounded another way.
        """
        layout = self.groups.layout
        return self.active[slot] or layout.sequence_parallel or layout.cp_size > 1

    def _pack(
        self, placed: Sequence[Placed], num_tokens: int, team: CpTeam, num_parts: int = 1
    ) -> PackedBatch:
        return pack(
            placed,
            num_tokens=num_tokens,
            num_slots=len(self.active),
            dropout_keys=self.dropout_keys,
            cp_rank=self.groups.cp_rank - team.first_rank,
            cp_size=team.size,
            device=self.groups.device,
            token_budget=self._row_budget // self.groups.layout.cp_size * team.size,
            num_parts=num_parts,
            exactness=self.shape.exactness,
        )

    def _nano_batch_packer(self) -> NanoBatchPacker:
        return NanoBatchPacker(
            num_nano_batches=self.num_nano_batches,
            multiple=row_multiple(self.groups),
            token_budget=self._row_budget,
            most_rows=self.micro_batch_tokens if self.shape.fills_budget else None,
            num_slots=len(self.active),
            dropout_keys=self.dropout_keys,
            groups=self.groups,
            cut=self.cut,
            exactness=self.shape.exactness,
        )

    def _num_rows(self, contents: Sequence[Sequence[Placed]]) -> int:
        """Rows of each micro-batch, over its context-parallel ranks."""
        if self.shape.fills_budget:
            return self.micro_batch_tokens
        longest = max((sum(p.item.length for p in placed) for placed in contents), default=0)
        return round_up(max(longest, 1), row_multiple(self.groups))

    def _rooms(self) -> list[ReplicaRoom] | None:
        """Unlike replicas as portions are dealt out to them; None where they are alike."""
        deployment = self.groups.deployment
        if deployment is None:
            return None
        return [*map(ReplicaRoom, self._budgets, deployment.row_work())]

    @property
    def _budgets(self) -> tuple[int, ...]:
        """Most rows of a micro-batch of every replica."""
        return self.groups.budgets(self.micro_batch_tokens)

    @property
    def _row_budget(self) -> int:
        return round_up(self.micro_batch_tokens, row_multiple(self.groups))


def row_multiple(groups: ParallelGroups) -> int:
    """Rows of a micro-batch come in multiples of this: whole GEMM tiles on every CP rank.

    Our GEMM gives a row the same bits whatever the number of rows. So do libraries on CPUs, once it
    is a multiple of 16 (one single row is another kernel). cuBLAS divides long sums by the number
    of rows where that is small, below 768 of an 8B model on an H200: where a job's bits must not
    depend on its neighbours it computes nothing (`ops.exactness`). A CP rank's rows are two chunks,
    or whole sequence-parallel shards.
    """
    tile = 128 if groups.device.type == "cuda" else 16
    return math.lcm(tile, groups.layout.tp_size, 2) * groups.layout.cp_size
