"""Flash attention equals one `scaled_dot_product_attention` a span, output and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen import flash4
from tlora_megatron.ops.frozen.packed_attention import Sight, attend_documents, attend_spans
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch

pytestmark = pytest.mark.gpu

LENGTHS = ((256,), (1, 63, 130, 2, 60), (17, 200, 5))
"""Documents of 256 tokens; the last one leaves padding."""


@pytest.fixture(params=["torch", "flash4"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose kernels run, forced."""
    problem = flash4.problem_of(torch.device("cuda", torch.cuda.current_device()))
    if request.param == "flash4" and problem:
        pytest.skip(f"needs flash-attn-4: {problem}")
    monkeypatch.setenv(flash4.VARIABLE, request.param)
    return request.param


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


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (64, True)])
def test_bits_of_a_document_in_any_company(
    kernels: str, head_dim: int, window: int | None, has_sinks: bool
) -> None:
    if kernels == "torch" and (window or head_dim != 128):
        pytest.skip("torch's kernels: tests/gpu/test_bits.py")
    sight = Sight(window=window, sinks_N=torch.randn(8, device="cuda") if has_sinks else None)
    for length in (1, 37, 64, 127, 128, 129, 257, 585, 1100):
        torch.manual_seed(length)
        own = [torch.randn(length, n, head_dim, device="cuda").bfloat16() for n in (8, 2, 2, 8)]
        alone = results_among(own, [length], 0, sight)
        for lengths, place in (
            ([length, 300], 0),
            ([300, length], 1),
            ([100] * 5 + [length, 600], 5),
            ([3] * 300 + [length], 300),
            ([1, length, 1], 1),
        ):
            found = results_among(own, lengths, place, sight)
            for name, mine, expected in zip(("out", "dq", "dk", "dv"), found, alone, strict=True):
                assert torch.equal(mine, expected), (length, lengths[:9], name)


def results_among(own: list[Tensor], lengths: list[int], place: int, sight: Sight) -> list[Tensor]:
    """A document's output and gradients beside others of random numbers, with exact bits."""
    documents = [Document(slot=0, length=length) for length in lengths]
    view = pack_micro_batch(
        documents, num_slots=1, num_tokens=2304, exactness=Exactness(row_budget=2304)
    )
    begin = sum(lengths[:place])
    rows = slice(begin, begin + lengths[place])
    whole = [torch.randn(2304, *x.shape[1:], device="cuda").bfloat16() for x in own]
    for x, mine in zip(whole, own, strict=True):
        x[rows] = mine
    q, k, v = (x.requires_grad_() for x in whole[:3])
    out = attend_documents(q, k, v, view, 0.125, sight)
    return [x[rows].detach() for x in (out, *torch.autograd.grad(out, (q, k, v), whole[3]))]


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (64, True)])
def test_what_is_not_finite_stays_in_its_document(
    head_dim: int, window: int | None, has_sinks: bool
) -> None:
    sight = Sight(window=window, sinks_N=torch.randn(8, device="cuda") if has_sinks else None)
    lengths = (37, 300, 1, 64, 585, 20, 20, 128, 129, 200)
    begins = [sum(lengths[:place]) for place in range(len(lengths))]
    torch.manual_seed(head_dim)
    drawn = [torch.randn(sum(lengths), n, head_dim, device="cuda").bfloat16() for n in (8, 2, 2, 8)]
    documents = [Document(slot=0, length=length) for length in lengths]
    exactness = Exactness(row_budget=sum(lengths))
    view = pack_micro_batch(documents, num_slots=1, num_tokens=sum(lengths), exactness=exactness)

    def results(tensors: list[Tensor]) -> list[Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
        out = attend_documents(q, k, v, view, 0.125, sight)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].clone())]

    clean = results(drawn)
    for place in (1, 3, 5, 9):
        own = slice(begins[place], begins[place] + lengths[place])
        for which, name in enumerate(("q", "k", "v", "dout")):
            for value in (float("nan"), float("inf"), 1e38):
                for row in (own.start, (own.start + own.stop) // 2, own.stop - 1):
                    ill = [x.clone() for x in drawn]
                    ill[which][row, -1, 3] = value
                    found = results(ill)
                    if value != 1e38:
                        assert not all(x[own].isfinite().all() for x in found), (place, name, row)
                    for x, expected in zip(found, clean, strict=True):
                        x[own] = expected[own]
                        assert torch.equal(x, expected), (place, name, value, row)
