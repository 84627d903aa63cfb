"""The operations of a layer, the head and the optimizer, as functions of what lies around own rows.

Each gives tensors that must depend on the own rows alone. Inputs of the own rows are drawn once,
those of the others anew in every context.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from scripts.bench.determinism.contexts import Context
from tests.helpers.kernel_case import KernelCase, gradients, make_case
from tlora_megatron.layers.vocabulary_head import VocabularyHead
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.adamw import fused_adamw
from tlora_megatron.ops.adamw_update import AdamUpdate
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen.norm_weight import NormWeight
from tlora_megatron.ops.frozen.packed_attention import attend_documents_vjp
from tlora_megatron.ops.frozen.parts import frozen_dgrad, frozen_product, swiglu_vjp
from tlora_megatron.ops.frozen.rms_norm import add_rms_norm_vjp
from tlora_megatron.ops.frozen.rotary import unpack_qkv_vjp
from tlora_megatron.ops.lora.kernel_choice import choose_ops
from tlora_megatron.ops.lora.linear_ops import OutputColumns
from tlora_megatron.ops.row_groups import segment_sums
from tlora_megatron.parallel.groups import ParallelGroups

Run = Callable[[Context, Exactness | None], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
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
        """Those of this machine."""
        if torch.cuda.is_available():
            sizes = (1024, 4096, 14336, 32, 8, 128, 128256)
            return cls.of(torch.device("cuda", 0), torch.bfloat16, sizes)
        return cls.of(torch.device("cpu"), torch.float32, (16, 64, 96, 4, 2, 16, 640))

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> Shapes:
        """In the order of the fields."""
        names = ("unit", "hidden", "ffn", "heads", "groups", "head_dim", "vocabulary")
        return cls(device=device, dtype=dtype, **dict(zip(names, sizes, strict=True)))

    def linears(self) -> dict[str, tuple[int, int]]:
        """Features in and out of each of a layer's linears."""
        wide = self.heads * self.head_dim
        return {
            "qkv": (self.hidden, wide + 2 * self.groups * self.head_dim),
            "o": (wide, self.hidden),
            "fc1": (self.hidden, 2 * self.ffn),
            "fc2": (self.ffn, self.hidden),
        }


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


def operations(shapes: Shapes) -> dict[str, Run]:
    """Returns all operations by name; each draws its inputs when it is first asked for."""
    u = shapes.unit
    documents = {
        "1 document": (2 * u,),
        "3 documents": (700 * u // 1024, 1000 * u // 1024, 348 * u // 1024),
        "8 documents": (u // 4,) * 8,
        "1 long document": (3 * u,),
        "long and short": (u // 3, 5 * u // 2, u // 2),
        "middle and short": (u // 3, 3 * u // 2, 5 * u // 4, u // 4),
    }
    made: dict[str, Callable[[], Run]] = {}
    for name, lengths in documents.items():
        made[f"attention, {name}"] = _maker(_attention, shapes, f"attention {name}", lengths)
    for linear in shapes.linears():
        made[f"{linear}, frozen"] = _maker(_frozen, shapes, linear, (2 * u,))
        for p in (0.0, 0.05):
            title = f"{linear}, rank 16, dropout {p}"
            made[title] = _maker(_adapted, shapes, linear, (2 * u,), p, 16)
        made[f"{linear}, adapted by others"] = _maker(_adapted, shapes, linear, (2 * u,), 0.0, 0)
    made["vocabulary head"] = _maker(_head, shapes, "head", (2 * u,))
    made["rms norm"] = _maker(_norm, shapes, "norm", (2 * u,))
    made["rms norm of Hugging Face"] = _maker(_torch_norm, shapes, "norm", (2 * u,))
    made["swiglu"] = _maker(_swiglu, shapes, "swiglu", (2 * u,))
    made["rotary"] = _maker(_rotary, shapes, "rotary", (2 * u,))
    made["sum of losses"] = _maker(_losses, shapes, "losses", (7 * u - 5,))
    made["adamw"] = _maker(_adamw, shapes, "adamw", (u,))
    return {name: _lazy(make) for name, make in made.items()}


def _maker(make: Callable[..., Run], *args: Any) -> Callable[[], Run]:
    return lambda: make(*args)


def _lazy(make: Callable[[], Run]) -> Run:
    held: list[Run] = []

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        if not held:
            held.append(make())
        return held[0](context, exactness)

    return run


def _attention(shapes: Shapes, name: str, documents: tuple[int, ...]) -> Run:
    rows = _Rows(shapes, name, documents)
    query = (shapes.heads, shapes.head_dim)
    key = (shapes.groups, shapes.head_dim)
    own = [rows.rows(*size) for size in (query, key, key, query)]

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        view = context.view(documents, exactness)
        q, k, v, dout = rows.among(context, view.num_tokens, *own)
        out, back = attend_documents_vjp(q, k, v, view, shapes.head_dim**-0.5)
        dq, dk, dv = back(dout)
        return rows.mine(context, {"out": out, "dq": dq, "dk": dk, "dv": dv})

    return run


def _frozen(shapes: Shapes, linear: str, documents: tuple[int, ...]) -> Run:
    rows = _Rows(shapes, linear, documents)
    size_in, size_out = shapes.linears()[linear]
    weight = rows.draw(size_out, size_in, scale=size_in**-0.5)
    own = [rows.rows(size_in), rows.rows(size_out)]

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        view = context.view(documents, exactness)
        x, dy = rows.among(context, view.num_tokens, *own)
        y = frozen_product(x, weight, None, exactness)
        return rows.mine(context, {"y": y, "dx": frozen_dgrad(dy, weight, exactness)})

    return run


def _adapted(
    shapes: Shapes, linear: str, documents: tuple[int, ...], dropout: float, rank: int
) -> Run:
    rows = _Rows(shapes, linear, documents)
    size_in, size_out = shapes.linears()[linear]
    weight = rows.draw(size_out, size_in, scale=size_in**-0.5)
    own = [rows.rows(size_in), rows.rows(size_out)]
    ops = choose_ops(shapes.device, shapes.dtype)
    first = _case(shapes, linear, ((rank or 1,),), (dropout,), seed=9)

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        view = context.view(documents, exactness)
        x, dy = rows.among(context, view.num_tokens, *own)
        if not rank and view.num_slots == 1:  # nobody adapts it
            y = frozen_product(x, weight, None, exactness)
            return rows.mine(context, {"y": y, "dx": frozen_dgrad(dy, weight, exactness)})
        case = _beside(shapes, linear, context, dropout, rank, first)
        bound = ops.bind(case.factors, view.rows)
        y, s = bound.forward(x, weight, None)
        ds = bound.backward_up(dy, s)
        dx = bound.dgrad(dy, ds, weight)
        bound.backward_down(x, dy, s, ds, (0, len(x)))
        found = rows.mine(context, {"y": y, "dx": dx})
        sums = gradients(case.factors)
        mine = {f"d{f}": sums[f"d{f}[{context.slot}][0]"] for f in "AB" if rank}
        return found | mine

    return run


def _case(
    shapes: Shapes,
    linear: str,
    ranks: tuple[tuple[int, ...], ...],
    dropout: tuple[float, ...],
    seed: int,
) -> KernelCase:
    size_in, size_out = shapes.linears()[linear]
    columns = (OutputColumns(groups=1, stride=size_out, begin=0, width=size_out),)
    device, dtype = str(shapes.device), shapes.dtype
    return make_case(
        ranks, columns, size_in, dtype=dtype, device=device, dropout=dropout, seed=seed
    )


def _beside(
    shapes: Shapes, linear: str, context: Context, dropout: float, rank: int, first: KernelCase
) -> KernelCase:
    """Factors of all jobs of a context; the own ones are those of `first`."""
    others = (*context.before, *context.after)
    ranks = [(n.rank,) for n in others]
    probabilities = [n.dropout for n in others]
    ranks.insert(context.slot, (rank,))
    probabilities.insert(context.slot, dropout)
    case = _case(shapes, linear, tuple(ranks), tuple(probabilities), seed=3)
    layout, own = case.layout, first.factors
    a, b = layout.a_begin[context.slot][0], layout.b_begin[context.slot][0]
    case.factors.lora_a[a : a + rank] = own.lora_a[:rank]
    case.factors.lora_b[0][b : b + rank] = own.lora_b[0][:rank]
    case.factors.scaling[context.slot] = 0.75
    return case


def _head(shapes: Shapes, name: str, documents: tuple[int, ...]) -> Run:
    rows = _Rows(shapes, name, documents)
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
        view = context.view(documents, exactness)
        hidden = rows.among(context, view.num_tokens, own)[0].requires_grad_()
        labels_T = torch.zeros(view.num_tokens, dtype=torch.int64, device=shapes.device)
        first = context.first_row
        labels_T[first : first + rows.count] = labels
        used = sum(n.rows for n in (*context.before, *context.after)) + rows.count
        chosen = torch.arange(used, device=shapes.device)
        losses = head.losses(hidden, chosen, labels_T, exactness)
        (grad,) = torch.autograd.grad(losses.sum(), hidden)
        return rows.mine(context, {"losses": losses.detach(), "dhidden": grad})

    return run


def _norm(shapes: Shapes, name: str, documents: tuple[int, ...]) -> Run:
    rows = _Rows(shapes, name, documents)
    weight = NormWeight(rows.draw(shapes.hidden), 1e-5, rounds_once=False)
    own = [rows.rows(shapes.hidden) for _ in range(4)]

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        total = context.view(documents, exactness).num_tokens
        x, residual, dout, dtotal = rows.among(context, total, *own)
        joined, out, back = add_rms_norm_vjp(x, residual, weight)
        return rows.mine(context, {"sum": joined, "out": out, "dx": back(dtotal, dout)})

    return run


def _torch_norm(shapes: Shapes, name: str, documents: tuple[int, ...]) -> Run:
    rows = _Rows(shapes, name, documents)
    own = [rows.rows(shapes.hidden), rows.rows(shapes.hidden)]

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        x, dy = rows.among(context, context.view(documents, exactness).num_tokens, *own)
        x.requires_grad_()
        wide = x.float()
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        (dx,) = torch.autograd.grad(y, x, dy)
        return rows.mine(context, {"y": y.detach(), "dx": dx})

    return run


def _swiglu(shapes: Shapes, name: str, documents: tuple[int, ...]) -> Run:
    rows = _Rows(shapes, name, documents)
    own = [rows.rows(2 * shapes.ffn), rows.rows(shapes.ffn)]

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        x, dy = rows.among(context, context.view(documents, exactness).num_tokens, *own)
        y, back = swiglu_vjp(x)
        return rows.mine(context, {"y": y, "dx": back(dy)})

    return run


def _rotary(shapes: Shapes, name: str, documents: tuple[int, ...]) -> Run:
    rows = _Rows(shapes, name, documents)
    groups, dim = shapes.groups, shapes.head_dim
    mixed = rows.rows(groups, shapes.heads // groups + 2, dim)
    own = [mixed, rows.rows(dim), rows.rows(dim), rows.rows(shapes.heads, dim)]
    own += [rows.rows(groups, dim), rows.rows(groups, dim)]

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        total = context.view(documents, exactness).num_tokens
        x, cos, sin, dq, dk, dv = rows.among(context, total, *own)
        (q, k, v), back = unpack_qkv_vjp(x, cos, sin)
        return rows.mine(context, {"q": q, "k": k, "v": v, "dx": back(dq, dk, dv)})

    return run


def _losses(shapes: Shapes, name: str, documents: tuple[int, ...]) -> Run:
    rows = _Rows(shapes, name, documents)
    own = rows.draw(rows.count, dtype=torch.float32).abs()

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        view = context.view(documents, exactness)
        values = rows.among(context, view.num_tokens, own)[0]
        lengths = torch.tensor(view.rows.lengths, device=shapes.device)
        sums = segment_sums(values, lengths, exact=exactness is not None)
        return {"sum": sums[context.slot : context.slot + 1]}

    return run


def _adamw(shapes: Shapes, name: str, documents: tuple[int, ...]) -> Run:
    rows = _Rows(shapes, name, documents)
    size = 1000 * shapes.unit + 3
    own = [rows.draw(size, dtype=torch.float32) for _ in range(4)]
    own[3].abs_()

    def run(context: Context, exactness: Exactness | None) -> dict[str, Tensor]:
        mine = _update(*(x.clone() for x in own))
        sizes = [n.rank * shapes.hidden for n in (*context.before, *context.after)]
        others = [
            _update(*(torch.rand(count, device=shapes.device) for _ in range(4))) for count in sizes
        ]
        others.insert(context.slot, mine)
        fused_adamw(others)
        return {"weight": mine.master, "first": mine.exp_avg, "second": mine.exp_avg_sq}

    return run


def _update(master: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> AdamUpdate:
    return AdamUpdate(
        master=master, grad=grad, exp_avg=first, exp_avg_sq=second, lr=1e-3, beta1=0.9,
        beta2=0.999, eps=1e-8, weight_decay=0.01, step=3, clip=0.7,
    )  # fmt: skip
