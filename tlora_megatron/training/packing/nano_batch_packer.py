"""Packs a round's micro-batches once more as they run in nano-batches (`parallel.nano_cuts`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tlora_megatron.ops.exactness import Exactness
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
    Placed,
    SplitBatch,
    documents_of,
    fill_rows,
    on_device,
)
from tlora_megatron.training.packing.row_arrays import join_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class NanoBatchPacker:
    """Packs the micro-batches of a round in nano-batches.

    Cuts follow from all sequences, those of placeholders too, so that jobs that are gone do not
    change which of the others' are computed together. A portion is in one nano-batch as a whole.
    """

    num_nano_batches: int
    """At most."""
    multiple: int
    """Rows of every nano-batch come in multiples of this."""
    token_budget: int
    """The most rows of one nano-batch; kernels are cut for its `num_nano_batches`-th part."""
    most_rows: int | None
    """The rows that every micro-batch has; None = as the fullest of the round needs."""
    num_slots: int
    dropout_keys: Sequence[int]
    groups: ParallelGroups
    cut: CutDocuments = cut_by_length
    exactness: Exactness | None = None

    def pack(
        self, bins: Sequence[Sequence[Placed]], is_run: Callable[[Placed], bool]
    ) -> list[SplitBatch | None]:
        """Packs each bin, all with equally many rows; None for each where no bin is cut.

        Args:
            is_run: True for items that have rows.
        """
        parts = [self._cut(placed, is_run) for placed in bins]
        if all(len(p) < 2 for p in parts):
            return [None] * len(bins)
        rows = [[self._rows(part) for part in p] for p in parts]
        num_rows = self.most_rows or max(max(map(sum, rows)), self.multiple)
        return [self._pack(p, r, num_rows) for p, r in zip(parts, rows, strict=True)]

    def _cut(
        self, placed: Sequence[Placed], is_run: Callable[[Placed], bool]
    ) -> list[list[Placed]]:
        """The items of each nano-batch, those without rows left out, and parts without any."""
        whole = _uncut(placed)
        cuts = cut_to_fit(
            [_as_document(items) for items in whole],
            self.num_nano_batches,
            multiple=self.multiple,
            most_rows=self.most_rows,
            cut=self.cut,
        )
        parts = [
            [p for items in whole[begin:end] for p in items if is_run(p)]
            for begin, end in itertools.pairwise(cuts)
        ]
        return [part for part in parts if part]

    def _rows(self, part: Sequence[Placed]) -> int:
        return padded_rows(documents_of(part), (0, len(part)), self.multiple)[0]

    def _pack(
        self, parts: Sequence[Sequence[Placed]], rows: Sequence[int], num_rows: int
    ) -> SplitBatch:
        filled = fill_parts(
            rows, num_rows=num_rows, multiple=self.multiple, most_rows=self.token_budget
        )
        contents = [*parts, *([()] * (len(filled) - len(parts)))]
        views = [
            pack_micro_batch(
                documents_of(part),
                num_slots=self.num_slots,
                num_tokens=count,
                dropout_keys=self.dropout_keys,
                token_budget=self.token_budget,
                num_parts=self.num_nano_batches,
                exactness=self.exactness,
            )
            for part, count in zip(contents, filled, strict=True)
        ]
        layout, device = self.groups.layout, self.groups.device
        order = shard_order(filled, layout.tp_size if layout.sequence_parallel else 1)
        joined = join_rows([*map(fill_rows, contents, filled)])
        batch = on_device(join_nano_batches(views), joined, order, device)
        return SplitBatch(
            replace(batch, order=to_device(order, device)),
            to_device(_places(parts, filled, order), device),
        )


def _uncut(placed: Sequence[Placed]) -> list[list[Placed]]:
    """Groups items that stay together: a portion, or a sequence that is in none.

    A portion's sums are its job's own only if no neighbour decides where it is cut.
    """

    def owner(entry: tuple[int, Placed]) -> tuple[int, int, bool]:
        index, (slot, _, portion) = entry
        return (slot, index, False) if portion is None else (slot, portion, True)

    groups = itertools.groupby(enumerate(placed), key=owner)
    return [[p for _, p in group] for _, group in groups]


def _as_document(items: Sequence[Placed]) -> Document:
    """Returns one document as long as all of these."""
    return Document(slot=items[0].slot, length=sum(p.item.length for p in items))


def _places(
    parts: Sequence[Sequence[Placed]], rows: Sequence[int], order: torch.Tensor
) -> torch.Tensor:
    """Returns the executed row of each row of the items in packed order, int64."""
    begins = itertools.accumulate(rows, initial=0)
    used = [sum(p.item.length for p in part) for part in parts]
    held = [torch.arange(begin, begin + count) for begin, count in zip(begins, used, strict=False)]
    return torch.argsort(order)[torch.cat([order[:0], *held])]
