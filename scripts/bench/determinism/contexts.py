"""Micro-batches around the same own rows: at other places, beside others, emptier and fuller."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tlora_megatron.ops.dropout import mix_ints
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch

TILE = 128 if torch.cuda.is_available() else 16
"""Rows of a micro-batch come in multiples of it, as in a run."""
OWN_KEY = mix_ints(77, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """Another job's rows."""

    documents: tuple[int, ...]
    rank: int = 8
    dropout: float = 0.0
    is_nan: bool = False
    """Its rows and weights are NaN."""

    @property
    def rows(self) -> int:
        """Rows of all documents."""
        return sum(self.documents)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The rows around the own ones."""

    name: str
    kind: str
    """Column of the table."""
    before: tuple[Neighbour, ...] = ()
    after: tuple[Neighbour, ...] = ()
    rows: int = 0
    """Rows of the micro-batch; fewer than it needs = as many as it needs, in whole tiles."""

    @property
    def first_row(self) -> int:
        """Where the own rows begin."""
        return sum(n.rows for n in self.before)

    @property
    def slot(self) -> int:
        """The own job's slot."""
        return len(self.before)

    def view(self, documents: tuple[int, ...], exactness: Exactness | None) -> MicroBatchView:
        """Packs the micro-batch."""
        jobs = [n.documents for n in self.before] + [documents] + [n.documents for n in self.after]
        used = sum(map(sum, jobs))
        rows = max(self.rows, -(-used // TILE) * TILE)
        placed = []
        for slot, lengths in enumerate(jobs):
            first = 0
            for length in lengths:
                placed.append(Document(slot=slot, length=length, first_token=first))
                first += length
        keys = [OWN_KEY if slot == self.slot else mix_ints(slot, 9) for slot in range(len(jobs))]
        return pack_micro_batch(
            placed,
            num_slots=len(jobs),
            num_tokens=rows,
            dropout_keys=keys,
            exactness=exactness,
        )

    def around(self, own: torch.Tensor, total: int, generator: torch.Generator) -> torch.Tensor:
        """Own rows in their place among random ones, and NaN where a neighbour is."""
        shape = (total, *own.shape[1:])
        rows = torch.randn(shape, generator=generator, device=own.device).to(own.dtype)
        begin = 0
        for neighbour in self.before:
            if neighbour.is_nan:
                rows[begin : begin + neighbour.rows] = torch.nan
            begin += neighbour.rows
        rows[begin : begin + len(own)] = own
        begin += len(own)
        for neighbour in self.after:
            if neighbour.is_nan:
                rows[begin : begin + neighbour.rows] = torch.nan
            begin += neighbour.rows
        rows[begin:] = 0
        return rows


ALONE = Context(name="alone", kind="again")


def contexts(unit: int) -> tuple[Context, ...]:
    """All contexts but `ALONE`.

    Args:
        unit: rows that scale them, 1,024 on a GPU.
    """

    def place(rows: int) -> Context:
        before = Neighbour(documents=(rows,))
        return Context(name=f"at row {rows}", kind="place", before=(before,))

    def beside(name: str, *before: Neighbour, after: tuple[Neighbour, ...] = ()) -> Context:
        return Context(name=name, kind="neighbours", before=before, after=after)

    some, many = (unit // 3, unit // 5), (max(1, unit // 64),) * 64
    return (
        *(place(rows) for rows in (1, 64, 333 % unit or 1, 1001 % unit or 1, 4 * unit)),
        beside("rank 1", Neighbour(documents=some, rank=1)),
        beside("rank 64, dropout", Neighbour(documents=some, rank=64, dropout=0.05)),
        beside("rank 128 of NaN", Neighbour(documents=some, rank=128, dropout=0.3, is_nan=True)),
        beside("64 documents", Neighbour(documents=many)),
        beside("2 long documents", Neighbour(documents=(3 * unit, 3 * unit), rank=64)),
        beside(
            "4 jobs, dropout",
            Neighbour(documents=some, rank=128, dropout=0.05),
            Neighbour(documents=(unit // 7,), rank=4),
            after=(Neighbour(documents=many, rank=33, dropout=0.3), Neighbour(documents=some)),
        ),
        *(
            Context(name=f"{rows} rows", kind="fill", rows=rows)
            for rows in (3 * unit, 4 * unit, 8 * unit, 16 * unit)
        ),
    )
