"""Windows and sinks of attention, against gpt-oss' attention of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from tlora_megatron.ops.frozen import packed_attention
from tlora_megatron.ops.frozen.packed_attention import (
    WHOLE,
    CumulativeLengths,
    Flash,
    Sight,
    attend_documents_vjp,
    attend_spans,
)
from tlora_megatron.ops.routing import Document, pack_micro_batch

HEADS, GROUPS, DIM, SCALE = 6, 2, 8, 0.4
LENGTHS = (1, 9, 30, 7)
SIGHTS = ["sinks", "window", "both"]


def draw(rows: int) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, and the output's gradient."""
    shapes = ((rows, HEADS, DIM), (rows, GROUPS, DIM), (rows, GROUPS, DIM))
    return [torch.randn(shape) for shape in shapes], torch.randn(rows, HEADS, DIM)


def sight_of(kind: str) -> Sight:
    return Sight(
        window=None if kind == "sinks" else 5,
        sinks_N=None if kind == "window" else torch.randn(HEADS) * 2,
    )


def attend_alone(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """transformers' attention of one document, `[T, N, D]`."""
    sinks = sight.sinks_N
    if sinks is None:
        sinks = torch.full((HEADS,), float("-inf"))
    module = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=sinks, training=False)
    rows = torch.arange(len(q))
    behind = rows[:, None] - rows
    unseen = behind < 0
    if sight.window is not None:
        unseen |= behind >= sight.window
    mask = torch.zeros(len(q), len(q)).masked_fill(unseen, float("-inf"))
    batch = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, _ = eager_attention_forward(module, *batch, mask[None, None], scaling=SCALE)
    return out[0]


def expected_of(tensors: list[Tensor], grad: Tensor, sight: Sight) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    parts = zip(*(x.split(LENGTHS) for x in leaves), strict=True)
    out = torch.cat([attend_alone(*part, sight) for part in parts])
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, value, wanted in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", SIGHTS)
def test_packed_documents_equal_transformers_one_by_one(kind: str) -> None:
    tensors, grad = draw(sum(LENGTHS))
    sight = sight_of(kind)
    documents = [Document(slot=0, length=length) for length in LENGTHS]
    view = pack_micro_batch(documents, num_slots=1, num_tokens=sum(LENGTHS))
    out, back = attend_documents_vjp(*tensors, view, SCALE, sight)
    assert_same((out, *back(grad)), expected_of(tensors, grad, sight))


@pytest.mark.parametrize("kind", SIGHTS)
def test_ranks_that_share_a_document_see_as_far(kind: str) -> None:
    """Under context parallelism a span's keys are more than its queries."""
    tensors, _ = draw(40)
    sight = sight_of(kind)
    expected = attend_alone(*tensors, sight)
    order = []
    parts = []
    for rank in range(2):
        view = pack_micro_batch(
            [Document(slot=0, length=40)], num_slots=1, num_tokens=40, cp_rank=rank, cp_size=2
        )
        rows, spans = view.local_rows(), view.attention
        runs = zip(spans.k_begins, spans.k_lens, strict=True)
        keys = torch.cat([torch.arange(begin, begin + length) for begin, length in runs])
        q, k, v = tensors
        parts.append(attend_spans(q[rows], k[keys], v[keys], view, SCALE, sight))
        order.append(rows)
    torch.testing.assert_close(torch.cat(parts), expected[torch.cat(order)], rtol=1e-5, atol=1e-5)


class _CpuFlash:
    """torch's flash attention of CPUs under the names of the GPU's operators, a call a document."""

    @staticmethod
    def _rows(begins: Tensor) -> list[int]:
        return begins.diff().tolist()

    @staticmethod
    def _mask(rows: int, window: dict[str, int]) -> Tensor:
        seen = torch.ones(rows, rows, dtype=torch.bool).tril()
        if window:
            assert window["window_size_right"] == 0
            seen = seen.triu(-window["window_size_left"])
        return torch.zeros(rows, rows).masked_fill(~seen, float("-inf"))

    @staticmethod
    def _heads(x: Tensor) -> Tensor:
        x = x if x.shape[1] == HEADS else x.repeat_interleave(HEADS // GROUPS, dim=1)
        return x.transpose(0, 1)[None]

    def _flash_attention_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        begins: Tensor,
        *others: Any,
        scale: float,
        **window: int,
    ) -> tuple[Tensor, ...]:
        outs, lses = [], []
        for part in zip(*(x.split(self._rows(begins)) for x in (q, k, v)), strict=True):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *map(self._heads, part), attn_mask=self._mask(len(part[0]), window), scale=scale
            )
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        none = torch.empty(0)
        return torch.cat(outs), torch.cat(lses, dim=1), none, none, none

    def _flash_attention_backward(
        self, dout: Tensor, *saved: Any, scale: float, **window: int
    ) -> tuple[Tensor, ...]:
        q, k, v, out, lse, begins = saved[:6]
        sizes, grads = self._rows(begins), []
        rows = zip(*(x.split(sizes) for x in (dout, q, k, v, out)), strict=True)
        for part, lse_NT in zip(rows, lse.split(sizes, dim=1), strict=True):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *map(self._heads, part),
                lse_NT[None].contiguous(),
                0.0,
                False,
                attn_mask=self._mask(len(part[0]), window),
                scale=scale,
            )
            grads.append([x[0].transpose(0, 1) for x in found])
        dq, dk, dv = (torch.cat(parts) for parts in zip(*grads, strict=True))
        return dq, *(x.unflatten(1, (GROUPS, -1)).sum(2) for x in (dk, dv))


@pytest.mark.parametrize("kind", [*SIGHTS, "neither"])
def test_kernels_without_sinks_go_back_with_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and logarithm with sinks make the kernel's own backward that of the sinks."""
    flash = SimpleNamespace(aten=_CpuFlash())
    monkeypatch.setattr(packed_attention, "torch", SimpleNamespace(**{**vars(torch), "ops": flash}))
    tensors, grad = draw(sum(LENGTHS))
    sight = WHOLE if kind == "neither" else sight_of(kind)
    begins = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    lengths = CumulativeLengths(begins, begins, max(LENGTHS), max(LENGTHS))
    flash = Flash(lengths, SCALE, sight)
    saved = flash.forward(*tensors)
    assert_same((saved[3], *flash.backward(grad, saved)), expected_of(tensors, grad, sight))
