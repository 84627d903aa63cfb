"""Adapters whose outer factors experts share, around one layer's call, and what autograd gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.integrations.megatron.layer.expert_parts import OuterCall
from tlora_megatron.ops.experts.branch import OuterFactors, OuterSide, OuterTarget
from tlora_megatron.ops.experts.choice import token_runs
from tlora_megatron.ops.experts.rows import RowSlots, sort_rows
from tlora_megatron.parallel.collectives import ExpertExchange

EXPERTS, CHOICES, HIDDEN, INNER = 5, 2, 40, 24
RANKS = ((4, 24), (), (3,))
"""Of each slot's targets; the adapter of the second one shares nothing."""
OF_DOWN = tuple(ranks[:1] for ranks in RANKS)
SCALING = (0.5, 2.0, 1.25)


class OuterCase(NamedTuple):
    """What the two linears of a layer are given."""

    call: OuterCall
    experts_TK: Tensor
    slots_T: Tensor
    x_TH: Tensor
    h_RI: Tensor
    d_first: Tensor
    """Gradient of the first linear's output `[R, 2 I]`."""
    d_second: Tensor
    """Of the experts' summed output `[T, H]`."""


def outer_case(num_rows: int, dtype: torch.dtype, device: str = "cpu") -> OuterCase:
    """Draws a case; values are bfloat16's in every dtype."""
    generator = torch.Generator().manual_seed(num_rows)

    def drawn(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, generator=generator) / 4).bfloat16().to(device, dtype)

    null = len(RANKS)
    slots_T = torch.randint(0, null + 1, (num_rows,), generator=generator).sort().values
    slots_T[0] = 0
    choices = torch.rand(num_rows, EXPERTS - 1, generator=generator).argsort(1)[:, :CHOICES]
    experts_TK = choices.sort(1).values.to(device)  # the last expert has no rows
    rows = sort_rows(experts_TK, EXPERTS, RowSlots(slots_T.to(device), null))
    ends = tuple(int((slots_T <= slot).sum()) for slot in range(null + 1))
    first, second = (
        _factors(drawn, ranks, torch.tensor(SCALING, device=device)) for ranks in (RANKS, OF_DOWN)
    )
    call = OuterCall(
        first=first,
        second=second,
        rows=rows,
        journey=ExpertExchange().begin(rows.counts_ES),
        tokens=token_runs(ends, slice(0, num_rows)),
    )
    places = num_rows * CHOICES
    return OuterCase(
        call, experts_TK, slots_T, drawn(num_rows, HIDDEN), drawn(places, INNER),
        drawn(places, 2 * INNER), drawn(num_rows, HIDDEN),
    )  # fmt: skip


def _factors(
    drawn: Callable[..., Tensor], ranks_of: Sequence[Sequence[int]], scaling: Tensor
) -> OuterFactors:
    """Draws the factors of a linear; those of experts lie target by target on its features."""
    shared, own, hidden = [], [], slice(0, HIDDEN)
    for ranks in ranks_of:
        ends = list(itertools.accumulate(ranks, initial=0))
        places = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
        inner = [slice(n * INNER, (n + 1) * INNER) for n in range(len(ranks))]
        shared.append(tuple(_target(drawn, 1, hidden, place) for place in places))
        pairs = zip(inner, places, strict=True)
        own.append(tuple(_target(drawn, EXPERTS, columns, place) for columns, place in pairs))
    width = -(-max(sum(ranks) for ranks in ranks_of) // 16) * 16
    return OuterFactors(OuterSide(tuple(shared)), OuterSide(tuple(own)), scaling, width)


def _target(drawn: Callable[..., Tensor], count: int, columns: slice, ranks: slice) -> OuterTarget:
    weight = drawn(count, ranks.stop - ranks.start, columns.stop - columns.start)
    grad = torch.zeros_like(weight, dtype=torch.float32)
    return OuterTarget(columns, ranks, weight, grad)


def results(case: OuterCase) -> dict[str, Tensor]:
    """Runs both linears forward and backward; returns outputs and gradients by name, on the CPU."""
    call, found = case.call, {}
    first, dx = torch.zeros_like(case.d_first), torch.zeros_like(case.x_TH)
    saved = call.add_to_first(case.x_TH, first)
    call.first_back(case.d_first, dx, saved)
    second, dh = torch.zeros_like(case.d_second), torch.zeros_like(case.h_RI)
    s_TC = call.sum_second(case.h_RI)
    call.add_to_second(s_TC, second)
    call.second_back(case.d_second, dh, lambda: case.h_RI, s_TC)
    found = {"first": first, "dx": dx, "second": second, "dh": dh}
    for name, target in _targets(case):
        found[name] = target.grad
    return {name: value.cpu() for name, value in found.items()}


def definition(case: OuterCase) -> dict[str, Tensor]:
    """The same by autograd, row by row in fp64, from the formulas."""
    leaf = {name: t.weight.double().requires_grad_() for name, t in _targets(case)}
    x, h = case.x_TH.double().requires_grad_(), case.h_RI.double().requires_grad_()
    first = torch.zeros(case.d_first.shape, dtype=torch.float64)
    second = torch.zeros(case.d_second.shape, dtype=torch.float64)
    for row, experts in enumerate(case.experts_TK.tolist()):
        slot = int(case.slots_T[row])
        if slot == len(RANKS):
            continue
        for choice, expert in enumerate(experts):
            place = int(case.call.rows.places_TK[row, choice])
            for number in range(len(RANKS[slot])):
                a, b = leaf[f"first {slot} {number} A"], leaf[f"first {slot} {number} B"]
                columns = slice(number * INNER, (number + 1) * INNER)
                first[place, columns] = SCALING[slot] * (a[0] @ x[row]) @ b[expert]
            for number in range(len(OF_DOWN[slot])):
                a, b = leaf[f"second {slot} {number} A"], leaf[f"second {slot} {number} B"]
                second[row] = second[row] + SCALING[slot] * (a[expert] @ h[place]) @ b[0]
    torch.autograd.backward([first, second], [case.d_first.double(), case.d_second.double()])
    found = {"first": first.detach(), "dx": _grad(x), "second": second.detach(), "dh": _grad(h)}
    return found | {name: _grad(value) for name, value in leaf.items()}


def _targets(case: OuterCase) -> list[tuple[str, OuterTarget]]:
    assert case.call.first is not None, "the case has both"
    assert case.call.second is not None, "the case has both"
    found = []
    for linear, factors, sides in (
        ("first", case.call.first, "AB"),
        ("second", case.call.second, "BA"),
    ):
        for side, targets in zip(sides, (factors.shared, factors.own), strict=True):
            for slot, of_slot in enumerate(targets.targets):
                for number, target in enumerate(of_slot):
                    found.append((f"{linear} {slot} {number} {side}", target))
    return found


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
