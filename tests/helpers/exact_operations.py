"""Operations on the same own rows, among other rows: what a row's bits depend on beside the row.

The operations are those that leak without exactness. Inputs of the own rows are drawn once, those
of the others anew in every context: again, at other places, beside neighbours (ranks, dropout, NaN,
many documents, long ones), in fuller and emptier micro-batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.helpers.kernel_case import KernelCase, columns_of, gradients, make_case
from tlora_megatron.layers.vocabulary_head import VocabularyHead
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.dropout import mix_ints
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen.losses import segment_sums
from tlora_megatron.ops.frozen.packed_attention import attend_documents_vjp
from tlora_megatron.ops.frozen.parts import frozen_dgrad, frozen_product
from tlora_megatron.ops.lora.kernel_choice import choose_ops
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups

KINDS = ("again", "place", "neighbours", "fill")
TILE = 128 if torch.cuda.is_available() else 16
"""Rows of a micro-batch come in multiples of it, as in a run."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    documents: tuple[int, ...]
    rank: int = 8
    dropout: float = 0.0
    is_nan: bool = False

    @property
    def rows(self) -> int:
        return sum(self.documents)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    name: str
    kind: str
    before: tuple[Neighbour, ...] = ()
    after: tuple[Neighbour, ...] = ()
    rows: int = 0
    """Rows of the micro-batch; fewer than it needs = as many as it needs, in whole tiles."""

    @property
    def first_row(self) -> int:
        return sum(n.rows for n in self.before)

    @property
    def slot(self) -> int:
        return len(self.before)

    def view(self, documents: tuple[int, ...], exactness: Exactness | None) -> MicroBatchView:
        jobs = [n.documents for n in self.before] + [documents] + [n.documents for n in self.after]
        placed = []
        for slot, lengths in enumerate(jobs):
            first = 0
            for length in lengths:
                placed.append(Document(slot=slot, length=length, first_token=first))
                first += length
        keys = [mix_ints(slot, 9) for slot in range(len(jobs))]
        keys[self.slot] = mix_ints(77, 3)
        rows = max(self.rows, -(-sum(map(sum, jobs)) // TILE) * TILE)
        return pack_micro_batch(
            placed, num_slots=len(jobs), num_tokens=rows, dropout_keys=keys, exactness=exactness
        )

    def around(self, own: Tensor, total: int, generator: torch.Generator) -> Tensor:
        """Own rows in their place among random ones, and NaN where a neighbour is."""
        shape = (total, *own.shape[1:])
        rows = torch.randn(shape, generator=generator, device=own.device).to(own.dtype)
        begin = 0
        for neighbour in (*self.before, None, *self.after):
            end = begin + (len(own) if neighbour is None else neighbour.rows)
            if neighbour is None:
                rows[begin:end] = own
            elif neighbour.is_nan:
                rows[begin:end] = torch.nan
            begin = end
        rows[begin:] = 0
        return rows


ALONE = Context(name="alone", kind="again")


def contexts(unit: int) -> tuple[Context, ...]:
    """All contexts but `ALONE`; `unit` rows scale them."""
    some, many = (unit // 3, unit // 5), (max(1, unit // 64),) * 64
    before_and_after: dict[str, tuple[tuple[Neighbour, ...], tuple[Neighbour, ...]]] = {
        "rank 1": ((Neighbour(some, 1),), ()),
        "rank 64, dropout": ((Neighbour(some, 64, 0.05),), ()),
        "rank 128 of NaN": ((Neighbour(some, 128, 0.3, is_nan=True),), ()),
        "64 documents": ((Neighbour(many),), ()),
        "2 long documents": ((Neighbour((3 * unit, 3 * unit), 64),), ()),
        "4 jobs, dropout": (
            (Neighbour(some, 128, 0.05), Neighbour((unit // 7,), 4)),
            (Neighbour(many, 33, 0.3), Neighbour(some)),
        ),
    }
    places = (1, 64, 333 % unit or 1, 1001 % unit or 1, 4 * unit)
    return (
        *(Context(name=f"at row {n}", kind="place", before=(Neighbour((n,)),)) for n in places),
        *(
            Context(name=name, kind="neighbours", before=before, after=after)
            for name, (before, after) in before_and_after.items()
        ),
        *(Context(name=f"{n * unit} rows", kind="fill", rows=n * unit) for n in (3, 4, 8, 16)),
    )


Run = Callable[[Context, Exactness | None], dict[str, Tensor]]


def search(run: Run, exactness: Exactness | None, unit: int, repeats: int) -> dict[str, str]:
    """What differs first in each kind of context; empty where all is equal."""
    found = dict.fromkeys(KINDS, "")
    expected = run(ALONE, exactness)
    for context in (*[ALONE] * repeats, *contexts(unit)):
        if not found[context.kind]:
            result = run(context, exactness)
            shares = {name: unequal(value, result[name]) for name, value in expected.items()}
            parts = [f"{name} {100 * share:.2g} %" for name, share in shares.items() if share]
            if parts:
                found[context.kind] = f"DIFF {context.name}: {', '.join(parts)}"
    return found


def unequal(one: Tensor, other: Tensor) -> float:
    size = one.element_size()
    a, b = (x.contiguous().flatten().view(torch.uint8).view(-1, size) for x in (one, other))
    return float((a != b).any(dim=1).double().mean())


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of the operations: Llama-3.1-8B's on a GPU, tiny ones elsewhere."""

    device: torch.device
    dtype: torch.dtype
    unit: int
    """Rows that all numbers of rows are made of."""
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocabulary: int

    @classmethod
    def here(cls) -> Shapes:
        if torch.cuda.is_available():
            sizes = (1024, 4096, 14336, 32, 8, 128, 128256)
            return cls(torch.device("cuda", 0), torch.bfloat16, *sizes)
        return cls(torch.device("cpu"), torch.float32, 16, 64, 96, 4, 2, 16, 640)


class _Rows:
    """Own inputs of one operation, and the micro-batch around them."""

    def __init__(self, shapes: Shapes, name: str, documents: tuple[int, ...]) -> None:
        self.documents, self.count = documents, sum(documents)
        self.shapes = shapes
        self._own = torch.Generator(shapes.device).manual_seed(zlib.crc32(name.encode()))
        self._others = torch.Generator(shapes.device).manual_seed(1)

    def draw(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self._own, device=self.shapes.device) * scale
        return drawn.to(dtype or self.shapes.dtype)

    def rows(self, *shape: int) -> Tensor:
        return self.draw(self.count, *shape)

    def among(self, context: Context, total: int, *own: Tensor) -> list[Tensor]:
        return [context.around(x, total, self._others) for x in own]

    def mine(self, context: Context, found: dict[str, Tensor]) -> dict[str, Tensor]:
        first = context.first_row
        return {key: x[first : first + self.count].clone() for key, x in found.items()}


def _attention(name: str, documents: Callable[[int], tuple[int, ...]], shapes: Shapes) -> Run:
    rows = _Rows(shapes, f"attention {name}", documents(shapes.unit))
    query, key = (shapes.heads, shapes.head_dim), (shapes.groups, shapes.head_dim)
    own = [rows.rows(*size) for size in (query, key, key, query)]

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        view = context.view(rows.documents, exactness)
        q, k, v, dout = rows.among(context, view.num_tokens, *own)
        out, back = attend_documents_vjp(q, k, v, view, shapes.head_dim**-0.5)
        dq, dk, dv = back(dout)
        return rows.mine(context, {"out": out, "dq": dq, "dk": dk, "dv": dv})

    return run


def _linear(rank: int | None, shapes: Shapes) -> Run:
    """The down projection, of which the own job adapts `rank` ranks; None: nobody adapts it."""
    rows = _Rows(shapes, "fc2", (2 * shapes.unit,))
    weight = rows.draw(shapes.hidden, shapes.ffn, scale=shapes.ffn**-0.5)
    own = [rows.rows(shapes.ffn), rows.rows(shapes.hidden)]
    ops = choose_ops(shapes.device, shapes.dtype)
    first = _case(shapes, ((rank or 1,),), (0.0,), seed=9)

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        view = context.view(rows.documents, exactness)
        x, dy = rows.among(context, view.num_tokens, *own)
        if rank is None or (not rank and view.num_slots == 1):
            y = frozen_product(x, weight, None, exactness)
            return rows.mine(context, {"y": y, "dx": frozen_dgrad(dy, weight, exactness)})
        case = _beside(shapes, context, rank, first)
        bound = ops.bind(case.factors, view.rows)
        y, s = bound.forward(x, weight, None)
        ds = bound.backward_up(dy, s)
        dx = bound.dgrad(dy, ds, weight)
        bound.backward_down(x, dy, s, ds, (0, len(x)))
        sums = gradients(case.factors)
        mine = {f"d{f}": sums[f"d{f}[{context.slot}][0]"] for f in "AB" if rank}
        return rows.mine(context, {"y": y, "dx": dx}) | mine

    return run


def _case(
    shapes: Shapes, ranks: tuple[tuple[int, ...], ...], dropout: tuple[float, ...], seed: int
) -> KernelCase:
    columns = columns_of(1, shapes.hidden)
    kind = {"dtype": shapes.dtype, "device": str(shapes.device)}
    return make_case(ranks, columns, shapes.ffn, dropout=dropout, seed=seed, **kind)


def _beside(shapes: Shapes, context: Context, rank: int, first: KernelCase) -> KernelCase:
    """Factors of all jobs of a context; the own ones are those of `first`."""
    others = (*context.before, *context.after)
    ranks, dropout = [(n.rank,) for n in others], [n.dropout for n in others]
    ranks.insert(context.slot, (rank,))
    dropout.insert(context.slot, 0.0)
    case = _case(shapes, tuple(ranks), tuple(dropout), seed=3)
    layout, own = case.layout, first.factors
    a, b = layout.a_begin[context.slot][0], layout.b_begin[context.slot][0]
    case.factors.lora_a[a : a + rank] = own.lora_a[:rank]
    case.factors.lora_b[0][b : b + rank] = own.lora_b[0][:rank]
    case.factors.scaling[context.slot] = 0.75
    return case


def _head(shapes: Shapes) -> Run:
    rows = _Rows(shapes, "head", (2 * shapes.unit,))
    weight = rows.draw(shapes.vocabulary, shapes.hidden, scale=shapes.hidden**-0.5)
    groups: Any = ParallelGroups(
        layout=ParallelLayout(), tp_rank=0, pp_rank=0, cp_rank=0, dp_rank=0,
        tp_group=None, dp_cp_group=None, model_group=None,  # type: ignore[arg-type]
        device=shapes.device,
    )  # fmt: skip
    head = VocabularyHead(SimpleNamespace(weight=weight), shapes.vocabulary - 7, groups)
    own = rows.rows(shapes.hidden)
    labels = torch.arange(rows.count, device=shapes.device) * 37 % (shapes.vocabulary - 7)

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        view = context.view(rows.documents, exactness)
        hidden = rows.among(context, view.num_tokens, own)[0].requires_grad_()
        labels_T = torch.zeros(view.num_tokens, dtype=torch.int64, device=shapes.device)
        first = context.first_row
        labels_T[first : first + rows.count] = labels
        used = sum(n.rows for n in (*context.before, *context.after)) + rows.count
        losses = head.losses(hidden, torch.arange(used, device=shapes.device), labels_T, exactness)
        (grad,) = torch.autograd.grad(losses.sum(), hidden)
        return rows.mine(context, {"losses": losses.detach(), "dhidden": grad})

    return run


def _losses(shapes: Shapes) -> Run:
    rows = _Rows(shapes, "losses", (7 * shapes.unit - 5,))
    own = rows.draw(rows.count, dtype=torch.float32).abs()

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        view = context.view(rows.documents, exactness)
        (values,) = rows.among(context, view.num_tokens, own)
        lengths = torch.tensor(view.rows.lengths, device=shapes.device)
        sums = segment_sums(values, lengths, exact=exactness is not None)
        return {"sum": sums[context.slot : context.slot + 1]}

    return run


_DOCUMENTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "1 document": lambda u: (2 * u,),
    "long and short": lambda u: (u // 3, 5 * u // 2, u // 2),
    "middle and short": lambda u: (u // 3, 3 * u // 2, 5 * u // 4, u // 4),
}
OPERATIONS: dict[str, Callable[[Shapes], Run]] = {
    **{f"attention, {name}": partial(_attention, name, own) for name, own in _DOCUMENTS.items()},
    "fc2, frozen": partial(_linear, None),
    "fc2, rank 16, dropout 0.0": partial(_linear, 16),
    "fc2, adapted by others": partial(_linear, 0),
    "vocabulary head": _head,
    "sum of losses": _losses,
}
"""Those that leak without exactness, and what they meet; each draws its inputs once."""
