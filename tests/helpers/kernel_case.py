"""One linear's factors, rows and gradients for the kernels themselves, beside the fp64 definition.

Unlike `linear_case` this builds `SiteFactors` directly, with any ranks and columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from tests.helpers.linear_case import error
from tlora_megatron.ops.dropout import SEED_COLUMNS, dropout_reference, mix_ints
from tlora_megatron.ops.lora.linear_ops import LinearOps, OutputColumns, SiteFactors
from tlora_megatron.ops.lora.tiling import RankLayout
from tlora_megatron.ops.routing import RowGroups


def columns_of(groups: int, *widths: int) -> tuple[OutputColumns, ...]:
    """Targets of so many columns, one beside the other in each group."""
    stride, begins = sum(widths), itertools.accumulate((0, *widths))
    return tuple(
        OutputColumns(groups=groups, stride=stride, begin=begin, width=width)
        for begin, width in zip(begins, widths, strict=False)
    )


WHOLE, QKV, GATE_UP = columns_of(1, 48), columns_of(2, 16, 8, 8), columns_of(1, 48, 48)
CASES = {
    "whole": (WHOLE, [[4], [16], [0], [40]]),
    "q k v": (QKV, [[4, 0, 17], [16, 16, 16], [0, 0, 0], [1, 40, 3]]),
    "gate up": (GATE_UP, [[4, 5], [16, 0], [33, 8], [9, 40]]),
}
"""Columns and ranks `[slot][target]`."""
ODD = tuple(OutputColumns(groups=3, stride=14, begin=b, width=w) for b, w in ((0, 5), (5, 3)))
"""Columns that begin nowhere near 16 bytes; the last of each group belong to no target."""


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New buffers hold NaN: what an element shows that no kernel writes."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    columns: tuple[OutputColumns, ...]
    layout: RankLayout
    factors: SiteFactors
    weight_NK: torch.Tensor
    bias_N: torch.Tensor
    p_S: tuple[float, ...]

    @property
    def out_size(self) -> int:
        return self.columns[0].groups * self.columns[0].stride


def make_case(
    ranks: Sequence[Sequence[int]],
    columns: tuple[OutputColumns, ...],
    in_size: int,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    dropout: Sequence[float] = (),
    seed: int = 0,
) -> KernelCase:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    layout = RankLayout(tuple(map(tuple, ranks)))
    sizes = [c.size for c in columns]
    out_size = columns[0].groups * columns[0].stride
    lora_a = torch.zeros(layout.a_rows, in_size, device=device, dtype=dtype)
    lora_b = [
        torch.zeros(n, size, device=device, dtype=dtype)
        for n, size in zip(layout.b_rows, sizes, strict=True)
    ]
    for slot, slot_ranks in enumerate(layout.ranks):
        for p, rank in enumerate(slot_ranks):
            a, b = layout.a_begin[slot][p], layout.b_begin[slot][p]
            lora_a[a : a + rank] = (draw(rank, in_size) * in_size**-0.5).to(dtype)
            lora_b[p][b : b + rank] = (draw(rank, sizes[p]) * max(rank, 1) ** -0.5).to(dtype)
    p_S = tuple(dropout) or (0.0,) * len(ranks)

    def grads(widths: Sequence[int]) -> tuple[tuple[torch.Tensor | None, ...], ...]:
        return tuple(
            tuple(
                torch.zeros(rank, width, device=device) if rank else None
                for rank, width in zip(slot, widths, strict=True)
            )
            for slot in layout.ranks
        )

    factors = SiteFactors(
        layout=layout,
        columns=columns,
        lora_a=lora_a,
        lora_b=tuple(lora_b),
        grad_a=grads([in_size] * len(columns)),
        grad_b=grads(sizes),
        is_aligned=True,
        scaling=torch.tensor([0.5 + 0.25 * (i % 5) for i in range(len(ranks))], device=device),
        dropout=torch.tensor(p_S, device=device),
        has_dropout=any(p_S),
        dropout_key=mix_ints(11),
        first_column=3 * SEED_COLUMNS,
    )
    weight = (draw(out_size, in_size) * in_size**-0.5).to(dtype)
    bias = draw(out_size).to(dtype)
    return KernelCase(
        columns=columns, layout=layout, factors=factors, weight_NK=weight, bias_N=bias, p_S=p_S
    )


def own_factors(whole: SiteFactors, part: int, parts: int) -> SiteFactors:
    """One rank's part of `lora_a` under s_lora, with views of its gradients; no gradient of B."""
    layout = RankLayout(tuple(tuple(-(-r // parts) for r in slot) for slot in whole.layout.ranks))
    lora_a = whole.lora_a.new_zeros(layout.a_rows, whole.lora_a.shape[1])
    grads: list[list[torch.Tensor | None]] = [[None] * len(slot) for slot in layout.ranks]
    for slot, ranks in enumerate(whole.layout.ranks):
        for p, rank in enumerate(ranks):
            size = -(-rank // parts)
            begin, end = min(part * size, rank), min((part + 1) * size, rank)
            source = whole.layout.a_begin[slot][p]
            target = layout.a_begin[slot][p]
            lora_a[target : target + end - begin] = whole.lora_a[source + begin : source + end]
            grad = whole.grad_a[slot][p]
            if grad is not None:
                grads[slot][p] = grad[begin:end]
    return replace(
        whole,
        layout=layout,
        lora_a=lora_a,
        lora_b=tuple(
            b.new_zeros(n, b.shape[1]) for n, b in zip(layout.b_rows, whole.lora_b, strict=True)
        ),
        grad_a=tuple(map(tuple, grads)),
        grad_b=tuple(tuple(None for _ in slot) for slot in layout.ranks),
    )


def make_rows(
    lengths: Sequence[int], padding: int = 0, budget: int = 0, cuts: Sequence[int] = ()
) -> RowGroups:
    """Segments of so many rows, then rows without an adapter; cut for these or for `budget`.

    Args:
        cuts: rows at which another portion of a segment's job begins.
    """
    ends, total = [], 0
    for n in (*lengths, padding):
        total += n
        ends.append(total)
    index = torch.cat([torch.arange(n) + 5 for n in (*lengths, padding)])
    keys = tuple(mix_ints(slot, 3) for slot in range(len(lengths)))
    return RowGroups(tuple(ends), index, keys, budget or total, cuts=tuple(cuts))


def one_by_one(rows: RowGroups) -> list[tuple[torch.Tensor, RowGroups]]:
    """Micro-batches with a portion of each slot at most: their rows here, and their groups."""
    begins = [0, *itertools.accumulate(n for _, n in rows.portions)]
    spans = [
        (slot, torch.arange(begin, begin + n))
        for (slot, n), begin in zip(rows.portions, begins, strict=False)
    ]
    by_slot = [[span for owner, span in spans if owner == slot] for slot in range(len(rows.ends))]
    found = []
    for turn in range(max(map(len, by_slot))):
        # The first one's padding and slots without rows are those of all.
        held = [own[turn] if turn < len(own) else own[0][:0] for own in by_slot]
        index = torch.cat(held)
        ends = tuple(itertools.accumulate(map(len, held)))
        groups = replace(rows, ends=ends, token_index=rows.token_index[index], cuts=(), _cache={})
        found.append((index, groups))
    return found


def assert_portions_add_up(
    ops: LinearOps, case: KernelCase, x_TK: torch.Tensor, dy_TN: torch.Tensor, rows: RowGroups
) -> None:
    """Cut rows leave every factor's gradient as `one_by_one` does, and uncut ones do not."""
    whole = added(ops, case, x_TK, dy_TN, replace(rows, cuts=(), _cache={}))
    at_once = added(ops, case, x_TK, dy_TN, rows)
    _fill_gradients(case.factors)
    for index, groups in one_by_one(rows):
        index = index.to(x_TK.device)
        forward_backward(ops, case, x_TK[index], dy_TN[index], groups)
    alone = gradients(case.factors)
    for name, grad in alone.items():
        assert torch.equal(at_once[name], grad), name
    cut = next(name for name in alone if name.startswith("dA[0]"))
    assert not torch.equal(whole[cut], alone[cut]), "the order must matter here"


def added(
    ops: LinearOps, case: KernelCase, x_TK: torch.Tensor, dy_TN: torch.Tensor, rows: RowGroups
) -> dict[str, torch.Tensor]:
    """Every factor's gradient by name, added to values that are drawn."""
    _fill_gradients(case.factors)
    forward_backward(ops, case, x_TK, dy_TN, rows)
    return gradients(case.factors)


def _fill_gradients(factors: SiteFactors) -> None:
    generator = torch.Generator(factors.lora_a.device).manual_seed(5)
    for grad in itertools.chain(*factors.grad_a, *factors.grad_b):
        if grad is not None:
            grad.normal_(generator=generator)


def operands(case: KernelCase, num_rows: int, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws x and the gradient of y."""
    weight = case.weight_NK
    generator = torch.Generator(weight.device).manual_seed(seed)
    x, dy = (
        torch.randn(num_rows, size, generator=generator, device=weight.device).to(weight.dtype)
        for size in reversed(weight.shape)
    )
    return x, dy


def compare(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Each by name: finite, and with an error below this share of the norm."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.isfinite(actual[name]).all(), name
        assert error(actual[name], value) < tolerance, name


def run(
    ops: LinearOps, case: KernelCase, x_TK: torch.Tensor, dy_TN: torch.Tensor, rows: RowGroups
) -> dict[str, torch.Tensor]:
    y, dx = forward_backward(ops, case, x_TK, dy_TN, rows)
    return {"y": y, "dx": dx, **gradients(case.factors)}


def forward_backward(
    ops: LinearOps, case: KernelCase, x_TK: torch.Tensor, dy_TN: torch.Tensor, rows: RowGroups
) -> tuple[torch.Tensor, torch.Tensor]:
    bound = ops.bind(case.factors, rows)
    y, s = bound.forward(x_TK, case.weight_NK, case.bias_N)
    ds = bound.backward_up(dy_TN, s)
    dx = bound.dgrad(dy_TN, ds, case.weight_NK)
    bound.backward_down(x_TK, dy_TN, s, ds, (0, rows.ends[-1]))
    return y, dx


def run_shared(
    ops: LinearOps,
    case: KernelCase,
    x_TK: torch.Tensor,
    dy_TN: torch.Tensor,
    rows: RowGroups,
    parts: int = 2,
) -> dict[str, torch.Tensor]:
    """Like `run`, for ranks that share `lora_a` as S-LoRA does, one after the other."""
    window, weight_NK = (0, len(x_TK)), case.weight_NK
    none = tuple(tuple(None for _ in slot) for slot in case.layout.ranks)
    whole = ops.bind(replace(case.factors, grad_a=none), rows)
    owns = [ops.bind(own_factors(case.factors, k, parts), rows) for k in range(parts)]
    taken = [own.rank_places().take(own.down(x_TK)) for own in owns]
    places = whole.rank_places(parts)
    s = places.put(torch.cat(taken))
    y = whole.linear(x_TK, weight_NK, case.bias_N, s)
    ds = whole.backward_up(dy_TN, s)
    dx = (1 - parts) * (dy_TN @ weight_NK).double()  # every rank adds it
    found: dict[str, torch.Tensor] = {}
    for own, values in zip(owns, places.take(ds).chunk(parts), strict=True):
        own_ds = own.rank_places().put(values)
        dx += own.dgrad(dy_TN, own_ds, weight_NK)
        own.backward_down(x_TK, dy_TN, s, own_ds, window, whole)
        for name, grad in gradients(case.factors).items():
            # Each has its rows of dA; of dB, which the first has, others may have none.
            known = found.setdefault(name, grad)
            found[name] = known if known is grad or name[1] == "B" else known + grad
    return {"y": y, "dx": dx, **found}


def gradients(factors: SiteFactors) -> dict[str, torch.Tensor]:
    found = {}
    for name, grads in (("dA", factors.grad_a), ("dB", factors.grad_b)):
        for slot, row in enumerate(grads):
            for p, grad in enumerate(row):
                if grad is not None:
                    found[f"{name}[{slot}][{p}]"] = grad.clone()
                    grad.zero_()
    return found


def reference(
    case: KernelCase, x_TK: torch.Tensor, dy_TN: torch.Tensor, rows: RowGroups
) -> dict[str, torch.Tensor]:
    """Output and every gradient by name: `ops.lora.linear_ops` in fp64, by autograd."""
    factors, device = case.factors, x_TK.device
    x = x_TK.detach().double().requires_grad_()
    dropped = x
    if factors.has_dropout and rows.dropout_keys:
        p_T = torch.tensor((*case.p_S, 0.0), device=device)[rows.row_slots(device)]
        ones = torch.ones(x.shape, device=device)
        keep = dropout_reference(
            ones, rows.row_keys(device), p_T, factors.dropout_key, factors.first_column
        )
        dropped = torch.where(keep > 0, x * (1.0 / (1.0 - p_T.double()))[:, None], 0.0)
    y = torch.nn.functional.linear(x, case.weight_NK.double(), case.bias_N.double())
    leaves: dict[str, torch.Tensor] = {}
    all_columns = torch.arange(case.out_size, device=device)[None]
    begin = 0
    for slot, end in enumerate(rows.ends[:-1]):
        for p, rank in enumerate(case.layout.ranks[slot]):
            a0, b0 = case.layout.a_begin[slot][p], case.layout.b_begin[slot][p]
            if not rank:
                continue
            lora_a = factors.lora_a[a0 : a0 + rank].double().requires_grad_()
            lora_b = factors.lora_b[p][b0 : b0 + rank].double().requires_grad_()
            leaves[f"dA[{slot}][{p}]"], leaves[f"dB[{slot}][{p}]"] = lora_a, lora_b
            s = dropped[begin:end] @ lora_a.t() * factors.scaling[slot].double()
            delta = torch.zeros(end - begin, case.out_size, dtype=torch.float64, device=device)
            delta = delta.index_copy(1, case.columns[p].read(all_columns)[0], s @ lora_b)
            y = y + torch.nn.functional.pad(delta, (0, 0, begin, len(x) - end))
        begin = end
    y.backward(dy_TN.double())
    grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, **grads}
