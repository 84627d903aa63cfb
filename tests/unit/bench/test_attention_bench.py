"""The benchmark of attention's backward pass, with attention a span in the place of its kernels."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.bench.determinism import attention
from scripts.bench.determinism.attention_variants import DEFAULT, PLAN, VARIANTS
from tlora_megatron.ops.frozen import packed_attention
from tlora_megatron.ops.frozen.packed_attention import attend_spans
from tlora_megatron.ops.routing import Document, pack_micro_batch


def attend(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, scale: float) -> Tensor:
    lengths = [b - a for a, b in itertools.pairwise(begins.tolist()) if b > a]
    documents = [Document(slot=0, length=n) for n in lengths]
    view = pack_micro_batch(documents, num_slots=1, num_tokens=sum(lengths))
    return attend_spans(q, k, v, view, scale)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(
        q: Tensor, k: Tensor, v: Tensor, lengths: Any, scale: float, sight: Any
    ) -> tuple[Tensor, ...]:
        out = attend(q, k, v, lengths.queries, scale)
        return q, k, v, out, torch.zeros(q.shape[1], len(q)), out, out

    def backward(
        dout: Tensor, saved: Sequence[Tensor], lengths: Any, state: Any, scale: float, window: Any
    ) -> tuple[Tensor, ...]:
        used = [x.detach().requires_grad_() for x in saved[:3]]
        end = int(lengths[0][-1])
        out = attend(*(x[:end] for x in used), lengths[0], scale)
        return torch.autograd.grad(out, used, dout[:end])

    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(packed_attention, "_forward", forward)
    monkeypatch.setattr(packed_attention, "_backward_kernel", backward)
    monkeypatch.setattr(attention, "SMALL", (5, 20))
    monkeypatch.setattr(attention, "HEAD_DIM", 8)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_variant_is_timed_where_it_is_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    few = ("--only", "all classes", "--shrink", 100, "--rounds", 1, "--warmup", 0)
    chosen = ("--heads", "16/4", "--variants", "default", "plan", "--csv", path)
    assert attention.main([str(word) for word in (*few, *chosen)]) == 0
    assert "0 wrong" in capsys.readouterr().out
    rows = list(csv.DictReader(path.open()))
    assert [(row["variant"], row["documents"]) for row in rows] == [
        ("default", "all classes"),
        ("plan", "all classes"),
    ]


@pytest.mark.usefixtures("on_the_cpu")
def test_one_whose_bits_are_its_neighbours_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    documents = (3, 4)
    inputs, dout = attention.draw(7, (4, 2), torch.device("cpu"), 7)

    def leaks(grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(x * len(grad) for x in (grad, *inputs[1:]))

    assert not attention.is_exact(PLAN, leaks, inputs, dout, documents)
    assert "comparisons DIFFER" in capsys.readouterr().out


def test_variants_have_other_classes() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    exact = [variant for variant in VARIANTS if variant is not DEFAULT]
    assert len({(v.classes(32, 8, 132), v.streams) for v in exact}) == len(exact)
