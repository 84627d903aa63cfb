"""Megatron's own layer of experts with several jobs' adapters, against our frozen one, which is
held to PEFT in `layer/test_expert_adapters.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import random
from torch import Tensor

from tests.helpers.built_experts import (
    LORAS,
    SPEC,
    errors,
    frozen,
    make_bank,
    megatrons,
    run_packed,
)
from tlora_megatron.integrations.megatron.built.expert_call import current_call
from tlora_megatron.ops.routing import Document, pack_micro_batch, use_micro_batch

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about the CPU"),
    pytest.mark.usefixtures("groups"),
]

KINDS = ("SequentialMLP allgather", "SequentialMLP alltoall", "TEGroupedMLP alltoall")
ROWS = (6, 1, 3, 4, 5, 2)
PLACE = (torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slot", [None, 4, 5])
def test_output_and_all_gradients_are_those_of_our_layer(slot: int | None, kind: str) -> None:
    """Of all jobs, and of one alone that shares a factor at one linear."""
    banks = make_bank(*PLACE), make_bank(*PLACE)
    like = frozen(banks[0])
    layers = like, megatrons(kind, like, banks[1])
    if slot is not None:
        for bank in banks:
            bank.install(bank.adapters[slot : slot + 1])
    x, dy = torch.randn(2, 24, 1, SPEC.hidden_size)
    rows = ROWS if slot is None else (20,)
    expected, found = (run_packed(layer, x, dy, rows) for layer in layers)
    found_errors = errors(found, expected, banks[1], banks[0])
    assert len(found_errors) > 10 if slot is None else len(found_errors) == 4
    assert max(found_errors.values()) < 5e-6, found_errors
    assert current_call() is None


def test_rows_at_experts_are_not_kept_for_backward() -> None:
    bank = make_bank(*PLACE)
    bank.install(bank.adapters[:1])
    layer = megatrons("TEGroupedMLP allgather", frozen(bank), bank)
    given: list[Tensor] = []  # held: their memory is not another's then
    layer.experts.linear_fc1.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    kept = set()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    x, dy = torch.randn(2, 24, 1, SPEC.hidden_size)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run_packed(layer, x, dy, (20,))
    (rows,) = given
    assert len(rows) == 48
    assert kept
    assert rows.untyped_storage().data_ptr() not in kept


@pytest.fixture
def _recompute_of_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for names that Megatron's `CheckpointWithoutOutput` has of Transformer Engine."""
    off = SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
    monkeypatch.setattr(random, "FP8GlobalStateManager", off, raising=False)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        monkeypatch.setattr(random, name, lambda **_: nullcontext(), raising=False)


@pytest.mark.usefixtures("_recompute_of_outputs")
def test_recompute_of_the_activation_frees_the_second_linears_input() -> None:
    banks = make_bank(*PLACE), make_bank(*PLACE)
    like = frozen(banks[0])
    options = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    layer = megatrons("TEGroupedMLP alltoall", like, banks[1], moe_grouped_gemm=True, **options)
    given: list[Tensor] = []
    layer.experts.linear_fc2.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    sizes = []

    def measure(*_: object) -> None:
        sizes.append(given[0].untyped_storage().nbytes())

    layer.register_forward_hook(measure)
    layer.register_full_backward_hook(measure)
    x, dy = torch.randn(2, 24, 1, SPEC.hidden_size)
    expected, found = (run_packed(module, x, dy, ROWS) for module in (like, layer))
    assert sizes == [0, 4 * 48 * SPEC.ffn_size]
    assert max(errors(found, expected, banks[1], banks[0]).values()) < 5e-6


@pytest.mark.usefixtures("_recompute_of_outputs")
def test_the_layers_input_may_be_computed_again() -> None:
    """As `--recompute-modules layernorm` does, which frees it behind the layer."""
    banks = make_bank(*PLACE), make_bank(*PLACE)
    like = frozen(banks[0])
    layer = megatrons("TEGroupedMLP allgather", like, banks[1])

    def whole(x: Tensor) -> tuple[Tensor, None]:
        return like(x.sin())

    def freed(x: Tensor) -> tuple[Tensor, None]:
        norm = random.CheckpointWithoutOutput()
        hidden = norm.checkpoint(torch.sin, x)
        y, bias = layer(hidden)
        norm.discard_output_and_register_recompute(y)
        assert hidden.untyped_storage().nbytes() == 0
        return y, bias

    x, dy = torch.randn(2, 24, 1, SPEC.hidden_size)
    expected, found = (run_packed(module, x, dy, ROWS) for module in (whole, freed))
    assert max(errors(found, expected, banks[1], banks[0]).values()) < 5e-6


@torch.no_grad()
def test_without_rows_of_jobs_megatron_s_layer_is_untouched() -> None:
    bank = make_bank(*PLACE)
    layer = megatrons("TEGroupedMLP alltoall", frozen(bank), bank)
    x = torch.randn(9, 1, SPEC.hidden_size)
    bare = layer(x)[0]  # outside of a run
    view = pack_micro_batch([Document(slot=2, length=9)], num_slots=len(LORAS), num_tokens=9)
    with use_micro_batch(view):
        assert torch.equal(layer(x)[0], bare)
    bank.install(bank.adapters[2:3])
    view = pack_micro_batch([Document(slot=0, length=9)], num_slots=1, num_tokens=9)
    with use_micro_batch(view):
        assert torch.equal(layer(x)[0], bare)
    assert current_call() is None
