"""Packs one round: which items this rank runs, and their rows, padding and nano-batches."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.model.cp_dispatch import CpRates, CpTeam
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.routing import Document, join_nano_batches, pack_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano_cuts import (
    CutDocuments,
    cut_by_length,
    cut_to_fit,
    fill_parts,
    padded_rows,
    shard_order,
)
from tlora_megatron.training.packing.packing import (
    Item,
    MicroBatch,
    PackedBatch,
    Placed,
    Round,
    RoundShape,
    SplitBatch,
    documents_of,
    fill_rows,
    on_device,
    pack,
    pair_rows,
    round_up,
)
from tlora_megatron.training.packing.portions import (
    FilledRound,
    ReplicaRoom,
    RoundRule,
    cut_round,
    fill_bins,
    fill_by_time,
    form_teams,
    with_recompute,
)
from tlora_megatron.training.packing.row_arrays import RowArrays


class PackedRound(NamedTuple):
    """One round, packed."""

    round: Round
    """The items of every data-parallel replica; the same on all ranks."""
    left: list[list[Item]]
    """Each slot's items that did not fit."""
    micro_batches: list[MicroBatch]
    """This rank's; in a pipeline all with equally many rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPacker:
    """Packs a round from the queues of all slots."""

    groups: ParallelGroups
    micro_batch_tokens: int
    """Token budget of one micro-batch, over its context-parallel ranks."""
    shape: RoundShape
    active: tuple[bool, ...]
    """False for each slot that holds a placeholder."""
    dropout_keys: tuple[int, ...] = ()
    """One for each slot; none when evaluating."""
    num_nano_batches: int = 1
    """Most nano-batches of a micro-batch."""
    cut: CutDocuments = cut_by_length
    """Chooses where a micro-batch is cut into nano-batches."""
    portion_tokens: tuple[int | None, ...] = ()
    """Tokens of a portion, by slot, see `packing.portions`; None = whatever room there is."""
    rule: RoundRule | None = None
    """Shares training rounds out by predicted time, and evaluations over unlike replicas; None =
    balances tokens."""
    cp_rates: CpRates | None = None
    """Shares a replica's part of a round out among teams of its context-parallel ranks; None = all
    of them run all micro-batches."""

    def fill_round(self, queues: Sequence[list[Item]], *, first_slot: int) -> FilledRound:
        """Chooses the round's items and the micro-batch of each; the device is not needed for it.

        The same on every rank.
        """
        filled = self._fill(queues, first_slot)
        if self.cp_rates is not None:
            return filled._replace(round=form_teams(filled.round, self.cp_rates, self._recompute))
        if self._recompute is not None and self.groups.most_stages == 1:
            cut = cut_round(filled.round, self._recompute, self._nano_padding)
            return filled._replace(round=cut)
        return filled

    def pack_filled(self, filled: FilledRound) -> PackedRound:
        """Packs this rank's micro-batches of a round."""
        mine, teams = filled.round.of_rank(self.groups.dp_rank, self.groups.cp_rank)
        if not teams:
            return PackedRound(*filled, self.pack(mine))
        contents = [self._with_rows(placed) for placed in mine]
        packed = [self._pack_of_team(*pair) for pair in zip(contents, teams, strict=True)]
        return PackedRound(*filled, packed)

    def _fill(self, queues: Sequence[list[Item]], first_slot: int) -> FilledRound:
        """Fills the micro-batches of all replicas."""
        asked, groups = self.shape.asked_micro_batches(), self.groups
        rule = self.rule if self.dropout_keys or groups.deployment is not None else None
        has_portions = bool(self.dropout_keys) and any(self.portion_tokens)
        if rule is not None and not has_portions:
            if groups.deployment is None and groups.layout.pp_size > 1:
                rule = rule.within(self._capacity(queues))  # pipelines recompute by rows
            return fill_by_time(queues, rule, first_slot=first_slot)
        rooms = None
        if groups.deployment is not None:
            assert has_portions, "unlike replicas have a rule"
            rooms = [*map(ReplicaRoom, self._budgets, groups.deployment.row_work())]
        if rule is not None and groups.most_stages == 1:
            asked = rule.portion_micro_batches(queues)
        return fill_bins(
            queues,
            capacity=self._capacity(queues),
            dp_size=groups.layout.dp_size,
            pp_size=groups.most_stages,
            first_slot=first_slot,
            num_micro_batches=asked,
            portion_tokens=self.portion_tokens if has_portions else None,
            rooms=rooms,
        )

    def pack_part(
        self, queues: Sequence[list[Item]], *, first_slot: int, micro_batches: int | None = None
    ) -> PackedRound:
        """Packs a round of what comes first in long queues, which are not sorted as a whole.

        Args:
            micro_batches: at most so many of every replica, for all queues together; at least one
                item goes. None = each queue alone could fill the round.
        """
        counts = self._counts_of_a_round(queues, micro_batches)
        portions = [queue[:count] for queue, count in zip(queues, counts, strict=True)]
        packed = self.pack_filled(self.fill_round(portions, first_slot=first_slot))
        lefts = zip(packed.left, queues, counts, strict=True)
        return packed._replace(left=[left + queue[count:] for left, queue, count in lefts])

    def _counts_of_a_round(
        self, queues: Sequence[Sequence[Item]], micro_batches: int | None
    ) -> list[int]:
        """Counts the items of each queue that could have room in a round; see `pack_part`."""
        if micro_batches is None:
            return [self._most_of_a_round(queue) for queue in queues]
        room, counts = sum(self._budgets) * micro_batches, []
        for queue in queues:
            ends = list(itertools.accumulate(item.length for item in queue))
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

        A pipeline's stages would have to tell each other every length, and its time follows its
        longest micro-batch in any case. A micro-batch that runs whole has the kernels of one in
        nano-batches: which of the two it is depends on a job's neighbours, and its bits must not.
        """
        alone = self.groups.layout.pp_size == 1 and not self.shape.fills_budget
        if alone and len(bins) > 1:
            return [micro_batch for placed in bins for micro_batch in self.pack([placed])]
        contents = [self._with_rows(placed) for placed in bins]
        longest = max((sum(p.item.length for p in placed) for placed in contents), default=0)
        num_tokens = self._fixed_rows or round_up(max(longest, 1), row_multiple(self.groups))
        everyone = CpTeam(0, self.groups.layout.cp_size)
        packed = [
            self._pack(placed, num_tokens, everyone, num_parts=self.num_nano_batches)
            for placed in contents
        ]
        found = [MicroBatch(*pair) for pair in zip(packed, self._split(bins), strict=True)]
        table = self._recompute
        return found if table is None else [with_recompute(own, table) for own in found]

    def _split(self, bins: Sequence[Sequence[Placed]]) -> list[SplitBatch | None]:
        """Packs each bin in nano-batches (`parallel.nano_cuts`), all with equally many rows.

        None for each where no bin is cut. Cuts follow from all sequences, those of placeholders
        too, so that jobs that are gone do not change which of the others' are computed together. A
        portion is in one nano-batch as a whole.
        """
        parts = [self._cut(placed) for placed in bins] if self.num_nano_batches > 1 else []
        if all(len(p) < 2 for p in parts):
            return [None] * len(bins)
        multiple = row_multiple(self.groups)
        rows = [
            [padded_rows(documents_of(part), (0, 2 * len(part)), multiple)[0] for part in p]
            for p in parts
        ]
        num_rows = self._fixed_rows or max(max(map(sum, rows)), multiple)
        return [self._pack_parts(p, r, num_rows) for p, r in zip(parts, rows, strict=True)]

    def _cut(self, placed: Sequence[Placed]) -> list[tuple[Placed, ...]]:
        """The items of each nano-batch, those without rows left out, and parts without any."""
        whole = _uncut(placed)
        cuts = cut_to_fit(
            [Document(slot=p[0].slot, length=sum(x.item.length for x in p)) for p in whole],
            self.num_nano_batches,
            multiple=row_multiple(self.groups),
            most_rows=self._fixed_rows,
            cut=self.cut,
        )
        parts = (
            self._with_rows([*itertools.chain(*whole[begin:end])])
            for begin, end in itertools.pairwise(cuts)
        )
        return [part for part in parts if part]

    def _pack_parts(
        self, parts: Sequence[Sequence[Placed]], rows: Sequence[int], num_rows: int
    ) -> SplitBatch:
        filled = fill_parts(
            rows,
            num_rows=num_rows,
            multiple=row_multiple(self.groups),
            most_rows=self._row_budget,
        )
        contents = [*parts, *([()] * (len(filled) - len(parts)))]
        views = [
            pack_micro_batch(
                documents_of(part),
                num_slots=len(self.active),
                num_tokens=count,
                dropout_keys=self.dropout_keys,
                token_budget=self._row_budget,
                num_parts=self.num_nano_batches,
                exactness=self.shape.exactness,
            )
            for part, count in zip(contents, filled, strict=True)
        ]
        layout, device = self.groups.layout, self.groups.device
        order = shard_order(filled, layout.tp_size if layout.sequence_parallel else 1)
        joined = RowArrays.join([*map(fill_rows, contents, filled)])
        batch = on_device(join_nano_batches(views), joined, order, device)
        places = _places(parts, filled, order)
        pairs = pair_rows([*itertools.chain(*parts)], places, device)
        return SplitBatch(
            replace(batch, order=to_device(order, device), pairs=pairs), to_device(places, device)
        )

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
            # A pipeline's micro-batches are of one length, so of one recompute.
            longest = max((longest, *(tokens or 0 for tokens in self.portion_tokens)))
            room = self._recompute.room_around(longest + self._nano_padding) - self._nano_padding
            return min(room, self.micro_batch_tokens)
        if not self.shape.fills_budget or self.num_nano_batches == 1:
            return self.micro_batch_tokens
        room = self.micro_batch_tokens - min(self._nano_padding, self.micro_batch_tokens // 8)
        return room if longest <= room else self.micro_batch_tokens

    @property
    def _nano_padding(self) -> int:
        """Rows that the nano-batches of a micro-batch may be padded by."""
        return (self.num_nano_batches > 1) * self.num_nano_batches * (row_multiple(self.groups) - 1)

    def _with_rows(self, placed: Sequence[Placed]) -> tuple[Placed, ...]:
        """Leaves placeholders out, unless ranks share the rows of a micro-batch.

        Sequence and context parallelism divide rows among ranks by row number: without a
        placeholder's rows the others' sequences would be divided elsewhere, and their gradients
        rounded another way.
        """
        layout = self.groups.layout
        all_have = layout.sequence_parallel or layout.cp_size > 1
        return tuple(p for p in placed if all_have or self.active[p.slot])

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

    @property
    def _budgets(self) -> tuple[int, ...]:
        """Most rows of a micro-batch of every replica."""
        return self.groups.budgets(self.micro_batch_tokens)

    @property
    def _fixed_rows(self) -> int | None:
        """Rows that every micro-batch has; None = as the fullest of the round needs."""
        return self.micro_batch_tokens if self.shape.fills_budget else None

    @property
    def _row_budget(self) -> int:
        return round_up(self.micro_batch_tokens, row_multiple(self.groups))


def row_multiple(groups: ParallelGroups) -> int:
    """Rows of a micro-batch come in multiples of this: whole GEMM tiles on every CP rank.

    Our GEMM gives a row the same bits whatever their number, libraries on CPUs once it is a
    multiple of 16. cuBLAS divides long sums by it where it is small, below 768 of an 8B model on an
    H200: where bits must not depend on neighbours it computes nothing (`ops.exactness`). A CP
    rank's rows are two chunks, or whole sequence-parallel shards.
    """
    tile = 128 if groups.device.type == "cuda" else 16
    return math.lcm(tile, groups.layout.tp_size, 2) * groups.layout.cp_size


def _uncut(placed: Sequence[Placed]) -> list[list[Placed]]:
    """Groups items that stay together: a portion, or a sequence that is in none.

    A portion's sums are its job's own only if no neighbour decides where it is cut.
    """

    def owner(entry: tuple[int, Placed]) -> tuple[int, int, bool]:
        index, (slot, _, portion) = entry
        return (slot, index, False) if portion is None else (slot, portion, True)

    groups = itertools.groupby(enumerate(placed), key=owner)
    return [[p for _, p in group] for _, group in groups]


def _places(parts: Sequence[Sequence[Placed]], rows: Sequence[int], order: Tensor) -> Tensor:
    """Returns the executed row of each row of the items in packed order, int64."""
    begins = itertools.accumulate(rows, initial=0)
    used = [sum(p.item.length for p in part) for part in parts]
    held = [torch.arange(begin, begin + count) for begin, count in zip(begins, used, strict=False)]
    return torch.argsort(order)[torch.cat([order[:0], *held])]
