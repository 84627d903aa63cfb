"""How a rank lays out the items of one round: rows, padding, placeholders, nano-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano.cuts import CutDocuments
from tlora_megatron.training.packing.nano_batches import NanoSplit
from tlora_megatron.training.packing.packing import Item, PackedBatch, Placed, pack, round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRows:
    """Packs what a rank runs in one round."""

    groups: ParallelGroups
    micro_batch_tokens: int
    fills_budget: bool
    """As `RoundShape.fills_budget`."""
    active: tuple[bool, ...]
    """A slot: whether its job is no placeholder."""
    dropout_keys: tuple[int, ...]
    """Of the slots; none when evaluating."""
    num_nano_batches: int
    """At most so many a micro-batch."""
    cut: CutDocuments

    def capacity(self, queues: Sequence[Sequence[Item]]) -> int:
        """Tokens of a micro-batch: all its rows, or fewer where these are fixed and nano-batches
        need some for their padding, as long as every sequence still fits."""
        if not self.fills_budget or self.num_nano_batches == 1:
            return self.micro_batch_tokens
        padding = self.num_nano_batches * (row_multiple(self.groups) - 1)
        room = self.micro_batch_tokens - min(padding, self.micro_batch_tokens // 8)
        longest = max((item.length for queue in queues for item in queue), default=0)
        return room if longest <= room else self.micro_batch_tokens

    def items(self, placed: Sequence[Placed]) -> tuple[Placed, ...]:
        """The items of a micro-batch that have rows: placeholders have none unless rows are cut
        over ranks.

        Sequence and context parallelism cut by row number: without a placeholder's rows the cut
        would fall elsewhere in the others' sequences, and round their gradients another way.
        """
        layout = self.groups.layout
        if layout.sequence_parallel or layout.cp_size > 1:
            return tuple(placed)
        return tuple(p for p in placed if self.active[p.slot])

    def pack(self, bins: Sequence[Sequence[Placed]]) -> list[PackedBatch]:
        """A micro-batch for each bin, padded to one length.

        One that is not cut has the kernels of one that is: a job's neighbours decide which it is.
        """
        layout = self.groups.layout
        mine = [self.items(placed) for placed in bins]
        num_tokens = self._num_rows(mine)
        batches = [
            pack(
                placed,
                num_tokens=num_tokens,
                num_slots=len(self.active),
                dropout_keys=self.dropout_keys,
                cp_rank=self.groups.cp_rank,
                cp_size=layout.cp_size,
                device=self.groups.device,
                token_budget=self._row_budget,
                num_parts=self.num_nano_batches,
            )
            for placed in mine
        ]
        if self.num_nano_batches == 1:
            return batches
        splits = self._nano_split().pack(bins, lambda placed: bool(self.items((placed,))))
        return [replace(b, split=s) for b, s in zip(batches, splits, strict=True)]

    def _nano_split(self) -> NanoSplit:
        return NanoSplit(
            num_nano_batches=self.num_nano_batches,
            multiple=row_multiple(self.groups),
            token_budget=self._row_budget,
            most_rows=self.micro_batch_tokens if self.fills_budget else None,
            num_slots=len(self.active),
            dropout_keys=self.dropout_keys,
            groups=self.groups,
            cut=self.cut,
        )

    def _num_rows(self, mine: Sequence[Sequence[Placed]]) -> int:
        """Rows of each micro-batch, over its context-parallel ranks."""
        if self.fills_budget:
            return self.micro_batch_tokens
        longest = max(sum(p.item.length for p in placed) for placed in mine)
        return round_up(max(longest, 1), row_multiple(self.groups))

    @property
    def _row_budget(self) -> int:
        return round_up(self.micro_batch_tokens, row_multiple(self.groups))


def row_multiple(groups: ParallelGroups) -> int:
    """Rows of a micro-batch come in multiples of this: whole GEMM tiles on every CP rank.

    GEMM libraries give a row the same bits whatever the number of rows once that is a multiple of
    their tile (16 on CPUs, 128 on GPUs; one single row is another kernel): so neighbours that come
    and go do not touch a job's rounding. A CP rank's rows are two chunks, or whole
    sequence-parallel shards.
    """
    tile = 128 if groups.device.type == "cuda" else 16
    return math.lcm(tile, groups.layout.tp_size, 2) * groups.layout.cp_size
