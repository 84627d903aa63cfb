"""A layer's sublayers compute what its modules do, to the bit, and hold no more than they must."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from tlora_megatron.config.schema import Recompute
from tlora_megatron.integrations.megatron.layer.frozen_layer import FrozenTransformerLayer
from tlora_megatron.model.layout import RECOMPUTES, LoraSharding, ParallelLayout
from tlora_megatron.model.quantisation import quantised_on_reading
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.routing import (
    Document,
    MicroBatchView,
    join_nano_batches,
    pack_micro_batch,
    use_micro_batch,
)
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.profiling.synthetic_run import SyntheticRun

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LENGTHS = (5, 11, 16)
SPEC = ModelSpec(
    model_type="llama", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8,
    ffn_size=48, vocab_size=64, max_positions=64, norm_eps=1e-5, rope_theta=1e4, qkv_bias=True,
)  # fmt: skip

NORMED = replace(SPEC, model_type="qwen3", qkv_bias=False, qk_norm=True)


class Case:
    """Two layers with adapters, and what one micro-batch gives.

    Args:
        sharding: where it is not fold, one of the jobs is block-diagonal: neither shares alike.
        is_fp8: the base's linears hold codes.
    """

    def __init__(
        self,
        recompute: Recompute = "none",
        targets: tuple[str, ...] = ALL,
        *,
        cp_size: int = 1,
        spec: ModelSpec = SPEC,
        dtype: torch.dtype = torch.float32,
        sharding: LoraSharding = "fold",
        is_fp8: bool = False,
    ) -> None:
        quantisation = quantised_on_reading(spec, ()) if is_fp8 else None
        layout = ParallelLayout(cp_size=cp_size)
        self.run = SyntheticRun(
            spec, layout, dtype=dtype, recompute=recompute, quantisation=quantisation
        )
        # A world of one shares with itself, by the same calls.
        self.run.sites = tuple(replace(site, lora_sharding=sharding) for site in self.run.sites)
        self.run.linears = [
            (replace(site, lora_sharding=sharding), linear) for site, linear in self.run.linears
        ]
        lengths = LengthHistogram.single(8)
        loads = [
            JobLoad(
                name=f"job{rank}",
                rank=rank,
                batch_size=1,
                lengths=lengths,
                targets=targets,
                dropout=0.2,
                num_blocks=1 if sharding == "fold" else rank // 2,
            )
            for rank in (2, 4)
        ]
        self.model = self.run.super_model(loads, sum(LENGTHS))
        self.decoder: Any = self.run.engine.model.decoder
        draw = torch.Generator().manual_seed(self.run.groups.cp_rank)
        shape = (sum(LENGTHS) // cp_size, 1, spec.hidden_size)
        drawn = torch.randn(2, *shape, generator=draw)
        self.hidden, self.dout = drawn.to(self.run.groups.device, dtype)

    @property
    def slabs(self) -> list[torch.Tensor]:
        return [grad for job in self.model.jobs for grad in job.adapter.slab.grad_views.values()]

    def results(self, view: MicroBatchView) -> list[torch.Tensor]:
        """Output, gradient of the input, gradients of all factors; the output without autograd."""
        for job in self.model.jobs:
            job.adapter.slab.zero_grad()
        hidden = self.hidden.clone().requires_grad_()
        with use_micro_batch(view):
            out = self.decoder(hidden_states=hidden, attention_mask=None)
            with torch.no_grad():
                again = self.decoder(hidden_states=hidden, attention_mask=None)
        out.backward(self.dout)
        assert hidden.grad is not None
        return [out.detach(), again, hidden.grad, *(grad.clone() for grad in self.slabs)]

    def view(self, num_parts: int) -> MicroBatchView:
        """`whole()`; or in two nano-batches, which the decoder can take from now on."""
        if num_parts == 1:
            return whole()
        self.run.engine.nano_batches.set_count(2)
        parts = [part(range(2), LENGTHS[:2], 2), part(range(2, 3), LENGTHS[2:], 2)]
        return join_nano_batches(parts)


def whole(**ranks: int) -> MicroBatchView:
    """A document of each job, and padding; `ranks` are of context parallelism."""
    return part(range(3), LENGTHS, **ranks)


def part(
    slots: range, lengths: tuple[int, ...], num_parts: int = 1, **ranks: int
) -> MicroBatchView:
    documents = [Document(slot=s, length=n) for s, n in zip(slots, lengths, strict=True) if s < 2]
    return pack_micro_batch(
        documents, num_slots=2, num_tokens=sum(lengths), dropout_keys=(3, 4),
        token_budget=sum(LENGTHS), num_parts=num_parts, **ranks,
    )  # fmt: skip


def use_modules(decoder: Any) -> None:
    """Has layers run by their modules, as something hangs on one of them."""
    for layer in decoder.layers:
        layer.mlp.linear_fc1.register_forward_hook(lambda *_: None)


def equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("options", "num_parts"),
    [
        *(({"targets": targets}, 1) for targets in (ALL, ("q_proj", "down_proj"), ("up_proj",))),
        *(({"sharding": sharding}, 1) for sharding in get_args(LoraSharding)[1:]),
        ({"is_fp8": True}, 1),
        ({"is_fp8": True}, 2),
        ({}, 2),
    ],
    ids=str,
)
def test_halves_compute_what_modules_do(
    options: dict[str, Any], num_parts: int, recompute: Recompute
) -> None:
    case = Case(recompute, **options)
    view = case.view(num_parts)
    assert all(layer.direct_sublayers for layer in case.decoder.layers)
    actual = case.results(view)
    assert all(grad.abs().max() > 0 for grad in case.slabs)
    use_modules(case.decoder)
    assert not any(layer.direct_sublayers for layer in case.decoder.layers)
    assert equal(actual, case.results(view))


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_micro_batch_chooses_what_is_computed_again(num_parts: int, is_fp8: bool) -> None:
    """To the bit, by sublayers and by modules; a run count says that it did."""
    case = Case(is_fp8=is_fp8)
    view = case.view(num_parts)
    expected, seen = case.results(view), Counter[str]()
    for _ in range(2):
        for recompute in RECOMPUTES:
            with counted_products(case.decoder, seen):
                assert equal(case.results(view.under(recompute)), expected), recompute
            # Once with autograd and once without; again in backward.
            again = {"none": (0, 0), "selective": (0, 1), "full": (1, 1)}[recompute]
            runs = {name: n / SPEC.num_layers / num_parts for name, n in seen.items()}
            assert runs == {"linear_qkv": 2 + again[0], "linear_fc1": 2 + again[1]}, recompute
        use_modules(case.decoder)


@contextmanager
def counted_products(decoder: Any, seen: Counter[str]) -> Iterator[None]:
    """Counts forward products of two linears, by sublayers or modules."""
    seen.clear()
    with pytest.MonkeyPatch.context() as patch:
        for layer in decoder.layers:
            for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
                for method in ("product_vjp", "forward"):
                    patch.setattr(linear, method, _counting(linear, method, seen))
        yield


def _counting(linear: Any, method: str, seen: Counter[str]) -> Any:
    inner, name = getattr(linear, method), linear.tlora_adapters.site.linear

    def run(*args: Any, **kwargs: Any) -> Any:
        seen[name] += 1
        return inner(*args, **kwargs)

    return run


@pytest.mark.parametrize("num_parts", [1, 2])
def test_halves_norm_heads_as_modules_do(num_parts: int) -> None:
    case = Case(spec=NORMED)
    view = case.view(num_parts)
    with torch.no_grad():
        for layer in case.decoder.layers:
            for norm in (layer.self_attention.q_layernorm, layer.self_attention.k_layernorm):
                norm.weight.uniform_(0.5, 2.0)
    assert all(layer.direct_sublayers for layer in case.decoder.layers)
    actual, seen = case.results(view), []
    for layer in case.decoder.layers:
        layer.self_attention.q_layernorm.register_forward_hook(lambda *_: seen.append(1))
    assert not any(layer.direct_sublayers for layer in case.decoder.layers)
    assert equal(actual, case.results(view))
    assert len(seen) == 2 * NORMED.num_layers * num_parts, "its way with a graph, and without"


@pytest.mark.parametrize("num_parts", [1, 2])
def test_what_hangs_on_the_final_norm_sees_all_rows(num_parts: int) -> None:
    case, seen = Case(), []
    view = case.view(num_parts)
    case.decoder.final_layernorm.register_forward_hook(lambda *args: seen.append(len(args[-1])))
    with use_micro_batch(view), torch.no_grad():
        case.decoder(hidden_states=case.hidden, attention_mask=None)
    assert sum(seen) == sum(LENGTHS)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_backward_lets_go_of_what_forward_saved(num_parts: int) -> None:
    case = Case()
    view = case.view(num_parts)
    saved: list[weakref.ref[torch.Tensor]] = []
    mlp = type(case.decoder.layers[0].mlp.linear_fc2)
    inner = mlp.product_vjp

    def product_vjp(self: Any, x: torch.Tensor, *args: Any) -> Any:
        saved.append(weakref.ref(x))
        return inner(self, x, *args)

    hidden = case.hidden.clone().requires_grad_()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch, use_micro_batch(view):
            patch.setattr(mlp, "product_vjp", product_vjp)
            out = case.decoder(hidden_states=hidden, attention_mask=None)
        assert any(ref() is not None for ref in saved), "backward needs them"
        out.backward(case.dout)
        assert all(ref() is None for ref in saved), "the graph is alive, its tensors are not"
    finally:
        gc.enable()
    assert isinstance(case.decoder.layers[0], FrozenTransformerLayer)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_what_a_stage_sends_is_no_view(num_parts: int) -> None:
    """Megatron's pipeline frees it, and refuses views."""
    case = Case()
    case.decoder.final_layernorm = None
    view = case.view(num_parts)
    with use_micro_batch(view):
        out = case.decoder(hidden_states=case.hidden.requires_grad_(), attention_mask=None)
    assert out._base is None
    assert out.shape == case.hidden.shape


def test_a_layer_goes_back_once() -> None:
    case = Case()
    with use_micro_batch(whole()):
        out = case.decoder(hidden_states=case.hidden.requires_grad_(), attention_mask=None)
    out.backward(case.dout, retain_graph=True)
    with pytest.raises(AssertionError, match="a layer goes back once"):
        out.backward(case.dout)
