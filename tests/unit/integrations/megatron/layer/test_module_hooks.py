"""Nothing that hangs on modules, or on what autograd saves, is skipped for layers to run faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as registry

from tests.unit.integrations.megatron.layer.test_frozen_sublayer import SPEC, Case, equal
from tlora_megatron.ops.routing import MicroBatchView, use_micro_batch

pytestmark = pytest.mark.slow
NUM_LAYERS = SPEC.num_layers
CALLS = Counter(
    {
        "FrozenTransformerLayer": NUM_LAYERS,
        "FrozenSelfAttention": NUM_LAYERS,
        "PackedCoreAttention": NUM_LAYERS,
        "FrozenMLP": NUM_LAYERS,
        "RMSNorm": 2 * NUM_LAYERS + 1,
        "column": 2 * NUM_LAYERS,
        "row": 2 * NUM_LAYERS,
    }
)
"""Calls of a decoder's modules by class, of linears by kind, for a micro-batch."""
ON_ALL: dict[str, Callable[[Any], Any]] = {
    "forward": registry.register_module_forward_hook,
    "forward_pre": registry.register_module_forward_pre_hook,
    "backward": registry.register_module_full_backward_hook,
    "backward_pre": registry.register_module_full_backward_pre_hook,
}
MODULES: dict[str, Callable[[Any], nn.Module]] = {
    "attention norm": lambda layer: layer.input_layernorm,
    "core attention": lambda layer: layer.self_attention.core_attention,
    "row-parallel": lambda layer: layer.self_attention.linear_proj,
    "MLP norm": lambda layer: layer.pre_mlp_layernorm,
    "column-parallel": lambda layer: layer.mlp.linear_fc1,
}


def run(
    case: Case, view: MicroBatchView, around: AbstractContextManager[Any] | None = None
) -> list[torch.Tensor]:
    """Output, gradients of the input and of all factors; forward and backward in a context."""
    for job in case.model.jobs:
        job.adapter.slab.zero_grad()
    hidden = case.hidden.clone().requires_grad_()
    with use_micro_batch(view), around or nullcontext():
        out = case.decoder(hidden_states=hidden, attention_mask=None)
        out.backward(case.dout)
    assert hidden.grad is not None
    return [out.detach(), hidden.grad, *(grad.clone() for grad in case.slabs)]


@contextmanager
def counted(kind: str, calls: Counter[str]) -> Iterator[None]:
    def count(module: Any, *_: Any) -> None:
        is_linear = hasattr(module, "tlora_adapters")
        calls[module.tlora_adapters.site.kind if is_linear else type(module).__name__] += 1

    handle = ON_ALL[kind](count)
    yield
    handle.remove()


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("kind", ON_ALL)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_hook_on_all_modules_sees_each(kind: str, num_parts: int) -> None:
    case, calls = Case(), Counter[str]()
    view = case.view(num_parts)
    actual = run(case, view, counted(kind, calls))
    expected = {name: num_parts * count for name, count in CALLS.items()}
    assert {name: calls[name] for name in CALLS} == expected
    assert all(layer.direct_sublayers for layer in case.decoder.layers), "the hook is gone"
    # Not to the bit: a norm's hook has the residual's gradient added behind the norm's own sum.
    torch.testing.assert_close(actual, run(case, view), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("compiles", [False, True], ids=["hook", "compiled"])
def test_what_hangs_on_a_module_is_called(
    name: str, num_parts: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, calls = Case(), []
    view = case.view(num_parts)
    expected = run(case, view)
    module = MODULES[name](case.decoder.layers[0])

    def compile_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs)

    if compiles:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", compile_nothing)
            module.compile()
    else:
        module.register_forward_hook(lambda *_: calls.append(1))
    assert equal(run(case, view), expected)
    assert len(calls) == num_parts


@pytest.mark.parametrize("num_parts", [1, 2])
def test_saved_tensors_go_through_hooks(num_parts: int) -> None:
    """A layer saves large tensors that are worth being moved: the MLP's product, say."""
    case, packed, unpacked = Case(), Counter[torch.Size](), Counter[torch.Size]()
    view = case.view(num_parts)

    def pack(x: torch.Tensor) -> torch.Tensor:
        packed[x.shape] += 1
        return x.detach()

    def unpack(x: torch.Tensor) -> torch.Tensor:
        unpacked[x.shape] += 1
        return x

    actual = run(case, view, saved_tensors_hooks(pack, unpack))
    rows = len(case.hidden) // num_parts
    for shape in [(rows, SPEC.hidden_size), (rows, 1, SPEC.ffn_size)]:
        assert packed[torch.Size(shape)] >= num_parts * NUM_LAYERS
        assert unpacked[torch.Size(shape)] >= num_parts * NUM_LAYERS
    assert all(layer.direct_sublayers for layer in case.decoder.layers), "the hooks are gone"
    assert equal(actual, run(case, view))
