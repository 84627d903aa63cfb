"""Splits a micro-batch into nano-batches: which documents, how many rows, in which order.

A nano-batch is a run of whole documents in packed order, padded on its own to a multiple that GEMM
libraries compute alike (`training.packing.round_packer`), so that a row's bits do not depend on
what runs beside it.

Under sequence parallelism each nano-batch is cut over the tensor-parallel ranks on its own. So that
a rank's rows are one run of the micro-batch's all the same, the micro-batch's rows are put in
another order once, where they are packed: rank by rank, and a rank's nano-batch by nano-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from tlora_megatron.ops.routing import Document
from tlora_megatron.parallel.nano.balance import balanced_cuts

CutDocuments = Callable[[Sequence[Document], int], tuple[int, ...]]
"""Takes documents in ascending order of slot and the most parts; returns cuts `(0, ..., n)`, where
part i is documents `[cuts[i], cuts[i + 1])`."""


def cut_by_length(documents: Sequence[Document], num_parts: int) -> tuple[int, ...]:
    """Splits into parts of about as many tokens each; between jobs where that is near enough."""
    return balanced_cuts([d.length for d in documents], [d.slot for d in documents], num_parts)


def cut_to_fit(
    documents: Sequence[Document],
    num_parts: int,
    *,
    multiple: int,
    most_rows: int | None,
    cut: CutDocuments = cut_by_length,
) -> tuple[int, ...]:
    """Splits into the most parts, at most `num_parts`, whose padded rows fit.

    Args:
        multiple: the rows of a part are padded to a multiple of it.
        most_rows: limit of all parts' rows together; None = no limit.
    """
    cuts = cut(documents, num_parts)
    while len(cuts) > 2 and most_rows is not None:
        if sum(padded_rows(documents, cuts, multiple)) <= most_rows:
            break
        cuts = cut(documents, len(cuts) - 2)
    return cuts


def padded_rows(
    documents: Sequence[Document], cuts: Sequence[int], multiple: int
) -> tuple[int, ...]:
    """Returns the rows of each part, rounded up to a multiple."""
    lengths = [
        sum(d.length for d in documents[begin:end]) for begin, end in itertools.pairwise(cuts)
    ]
    return tuple(-(-length // multiple) * multiple for length in lengths)


def fill_parts(
    rows: Sequence[int], *, num_rows: int, multiple: int, most_rows: int
) -> tuple[int, ...]:
    """Returns the rows of each part after padding has brought them to `num_rows` together.

    Padding goes to the smallest part; where all parts are full, a part of padding is added.

    Args:
        rows: multiples of `multiple`, none of them 0, as `num_rows` and `most_rows` are.
        most_rows: limit of one part's rows.
    """
    filled = list(rows)
    spare = num_rows - sum(filled)
    assert spare >= 0, f"{sum(filled)} rows must fit into {num_rows}"
    while spare:
        smallest = min(range(len(filled)), key=filled.__getitem__) if filled else None
        if smallest is None or filled[smallest] >= most_rows:
            filled.append(0)
            smallest = len(filled) - 1
        filled[smallest] += multiple
        spare -= multiple
    return tuple(filled)


def shard_order(rows: Sequence[int], num_shards: int) -> torch.Tensor:
    """Returns the packed row of every row in sequence-parallel order, int64 `[sum(rows)]`.

    Shard r of the result is, nano-batch by nano-batch, the r-th of `num_shards` equal runs of it.

    Args:
        rows: of each nano-batch, multiples of `num_shards`.
    """
    begins = [0, *itertools.accumulate(rows)]
    runs = [
        torch.arange(begin + shard * size // num_shards, begin + (shard + 1) * size // num_shards)
        for shard in range(num_shards)
        for begin, size in zip(begins, rows, strict=False)
    ]
    return torch.cat(runs)
