"""Flash attention equals one `scaled_dot_product_attention` a span, output and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen.packed_attention import Sight, attend_documents, attend_spans
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch

pytestmark = pytest.mark.gpu

LENGTHS = ((256,), (1, 63, 130, 2, 60), (17, 200, 5))
"""Documents of 256 tokens; the last one leaves padding."""


def inputs(view: MicroBatchView, heads: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """Query `[T, heads, 64]`, and key and value `[K, groups, 64]` in span order."""
    torch.manual_seed(0)
    keys = sum(view.attention.k_lens)
    shapes = ((view.num_tokens, heads), (keys, groups), (keys, groups))
    return [
        torch.randn(*shape, 64, device="cuda", dtype=dtype).requires_grad_() for shape in shapes
    ]


@pytest.mark.parametrize(
    ("cp_size", "exactness"),
    [(1, None), (2, None), (1, Exactness(short_document=100, long_document=150))],
)
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_equals_spans(
    lengths: tuple[int, ...],
    groups: int,
    cp_size: int,
    exactness: Exactness | None,
    dtype: torch.dtype,
) -> None:
    view = pack_micro_batch(
        [Document(slot=0, length=length) for length in lengths],
        num_slots=1,
        num_tokens=256,
        cp_rank=cp_size - 1,
        cp_size=cp_size,
        exactness=exactness,
    )
    weights = torch.randn(view.num_tokens, 8, 64, device="cuda")
    weights[sum(lengths) :] = 0  # padding has no loss, and then no gradients
    check(view, inputs(view, 8, groups, dtype), weights)


def check(view: MicroBatchView, tensors: list[Tensor], weights: Tensor, *sight: Sight) -> None:
    """Output and gradients of `attend_documents` are those of the spans in fp32."""
    results = []
    for attend in (attend_spans, attend_documents):
        used = [t.float() if attend is attend_spans else t for t in tensors]
        used = [t.detach().requires_grad_() for t in used]
        out = attend(*used, view, 0.125, *sight)
        grads = torch.autograd.grad((out.float() * weights).sum(), used)
        results.append(dict(zip(("out", "query", "key", "value"), (out, *grads), strict=True)))
    reference, fused = results
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3}[tensors[0].dtype]
    for name, expected in reference.items():
        error = (fused[name].float() - expected).abs().max() / expected.abs().max()
        assert error < tolerance, f"{name}: relative error {error.item()}"


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_windows_and_sinks(has_sinks: bool, window: int | None, cp_size: int) -> None:
    lengths = (1, 63, 130, 2, 60)
    documents = [Document(slot=0, length=length) for length in lengths]
    view = pack_micro_batch(
        documents, num_slots=1, num_tokens=256, cp_rank=cp_size - 1, cp_size=cp_size
    )
    tensors = inputs(view, 8, 2, torch.bfloat16)
    weights = torch.randn(view.num_tokens, 8, 64, device="cuda")
    sinks = 2 * torch.randn(8, device="cuda") if has_sinks else None
    check(view, tensors, weights, Sight(window=window, sinks_N=sinks))


def test_gradients_are_bitwise_the_same_where_torch_is_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many heads and few documents: where atomics would add up in another order each time."""
    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    lengths = (700, 300, 1048)
    view = pack_micro_batch(
        [Document(slot=0, length=length) for length in lengths], num_slots=1, num_tokens=2048
    )
    tensors = inputs(view, 8, 2, torch.bfloat16)
    results = []
    try:
        for _ in range(4):
            out = attend_documents(*tensors, view, 0.125)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
    finally:
        torch.use_deterministic_algorithms(before)
    for index, name in enumerate(("out", "query", "key", "value")):
        assert all(torch.equal(results[0][index], r[index]) for r in results[1:]), name
