"""Splits a micro-batch into nano-batches that cost the same: which documents, in which order.

A document's cost follows from its length (linears grow with it, attention with its square) and
its job's rank and targets. Costs are in multiply-adds of the base's GEMMs a layer, forward and
input gradient together; only ratios matter, and tensor parallelism divides all of them alike.

A nano-batch is a run of whole documents in packed order, padded on its own to a multiple that GEMM
libraries compute alike (`training.packing.round_packer`), so that a row's bits do not depend on
what runs beside it.

Under sequence parallelism each nano-batch is cut over the tensor-parallel ranks on its own. So that
a rank's rows are one run of the micro-batch's all the same, the micro-batch's rows are put in
another order once, where they are packed: rank by rank, and a rank's nano-batch by nano-batch.

"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.routing import Document

TOLERANCE = 0.1
"""By how much the largest part may exceed the least possible one to end where a job ends, or to do
with fewer parts. A chosen value: what a job's border saves (its factors are read, and its gradients
summed, in one part) is of this order, not measured."""

_PAIR = 7 * 3.3
"""Multiply-adds a head element of one query-key pair: 2 forward and 5 backward (flash attention
computes the scores again), each 3.3 times as slow as a GEMM's: 195 against 650 TFLOP/s for
sequences of 1,024 tokens on an H200 (configs/hardware/h200.json)."""
_RANK_CHUNK = 16
"""Ranks cost what the next multiple costs."""
_UNITS = 2**40
"""Whole parts that a micro-batch's cost is counted in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCosts:
    """Costs of a micro-batch's rows in one layer."""

    row: float
    """Cost of a row in the frozen linears."""
    pair: float
    """Cost of a row's attention to one row."""
    adapters: tuple[float, ...]
    """Cost of a row in its adapter's branches, by slot. On an H200 16 ranks add to a linear of K
    inputs and N outputs what 16 (N + K) multiply-adds take (the profile's forward_rank_s and
    backward_rank_s); what branches cost every row alike is left out."""

    @classmethod
    def of(cls, spec: ModelSpec, loras: Sequence[LoraSpec]) -> RowCosts:
        """Returns the costs in a backbone; `loras` are the jobs' in slot order."""
        return cls(
            row=2.0 * spec.row_weights,
            pair=_PAIR * spec.q_size,
            adapters=tuple(_adapter_row(spec, lora) for lora in loras),
        )

    def document(self, slot: int, length: int) -> float:
        """Returns the cost of a whole document; a slot without an adapter is padding."""
        adapter = self.adapters[slot] if slot < len(self.adapters) else 0.0
        return length * (self.row + adapter) + self.pair * length * (length + 1) / 2

    def cut(self, documents: Sequence[Document], num_parts: int) -> tuple[int, ...]:
        """Returns `balanced_cuts` of a micro-batch's documents, in ascending order of slot."""
        costs = [self.document(d.slot, d.length) for d in documents]
        return balanced_cuts(costs, [d.slot for d in documents], num_parts)


def _adapter_row(spec: ModelSpec, lora: LoraSpec) -> float:
    chunked = -(-lora.rank // _RANK_CHUNK) * _RANK_CHUNK
    return float(chunked * sum(sum(spec.target_shape(t)) for t in lora.target_modules))


def balanced_cuts(
    costs: Sequence[float],
    jobs: Sequence[int],
    num_parts: int,
    *,
    tolerance: float = TOLERANCE,
) -> tuple[int, ...]:
    """Cuts documents into contiguous parts whose largest cost is near the least possible.

    Within `tolerance` of that least it takes the fewest parts, and ends them where a job ends. So
    one document that is longer than an even part leads to fewer parts, or uneven ones.

    Args:
        costs: of each document, above 0.
        jobs: the job of each document; documents of one job are side by side.
        num_parts: at most so many.

    Returns:
        `(0, ..., len(costs))`: part i is documents `[cuts[i], cuts[i + 1])`, none of them empty.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    if not costs:
        return (0,)
    # In whole numbers: rounding would let sums from the left and from the right disagree.
    scale = _UNITS / sum(costs)
    ends = [0, *itertools.accumulate(max(1, round(cost * scale)) for cost in costs)]
    limit = int(_least_largest(ends, min(num_parts, len(costs))) * (1.0 + tolerance))
    return _cut(ends, jobs, limit, _parts_within(ends, limit))


def _least_largest(ends: Sequence[int], num_parts: int) -> int:
    """Returns the smallest cost that `num_parts` parts can all keep within."""
    low = max(end - begin for begin, end in itertools.pairwise(ends))
    high = ends[-1]
    while low < high:
        middle = (low + high) // 2
        if _parts_within(ends, middle) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low


def _parts_within(ends: Sequence[int], limit: int) -> int:
    """Returns the fewest parts of at most `limit` each; every document fits into one."""
    count = begin = 0
    while begin < len(ends) - 1:
        begin = _farthest(ends, begin, limit)
        count += 1
    return count


def _farthest(ends: Sequence[int], begin: int, limit: int) -> int:
    """Returns where the longest part from `begin` on ends."""
    return bisect_right(ends, ends[begin] + limit) - 1


def _cut(ends: Sequence[int], jobs: Sequence[int], limit: int, num_parts: int) -> tuple[int, ...]:
    """Cuts into `num_parts` parts within a limit that they can keep, near their even places."""
    earliest = _earliest_begins(ends, limit, num_parts)
    cuts = [0]
    for left in range(num_parts - 1, 0, -1):
        begin = cuts[-1]
        first = max(begin + 1, earliest[left])
        last = min(_farthest(ends, begin, limit), len(jobs) - left)
        even = ends[begin] + (ends[-1] - ends[begin]) / (left + 1)
        cuts.append(_nearest_cut(ends, jobs, first, last, even))
    return (*cuts, len(jobs))


def _earliest_begins(ends: Sequence[int], limit: int, num_parts: int) -> list[int]:
    """Returns in entry n the first document from which n parts within the limit hold the rest."""
    begins = [len(ends) - 1]
    for _ in range(num_parts):
        end = begins[-1]
        begins.append(bisect_left(ends, ends[end] - limit))
    return begins


def _nearest_cut(
    ends: Sequence[int], jobs: Sequence[int], first: int, last: int, even: float
) -> int:
    """Returns the cut in `[first, last]` nearest to a cost; one between jobs if there is any."""
    between_jobs = [cut for cut in range(first, last + 1) if jobs[cut - 1] != jobs[cut]]
    return min(between_jobs or range(first, last + 1), key=lambda cut: abs(ends[cut] - even))


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
