"""A multi-adapter linear around a foreign base, besides its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear

from tests.helpers.built_model import LORAS, fill_bank
from tests.helpers.one_process import one_process_groups
from tests.helpers.te_stand_in import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from tests.helpers.user_models import SPEC, user_config
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.black_box import InputNorm
from tlora_megatron.layers.multi_adapter import BlackBoxMixin, MegatronLinearMixin, attach
from tlora_megatron.layers.sites import Site, make_site
from tlora_megatron.ops.routing import Document, pack_micro_batch, use_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about the CPU")

VIEW = pack_micro_batch(
    [Document(slot=0, length=5), Document(slot=1, length=4)], num_slots=2, num_tokens=12
)


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    with one_process_groups() as groups:
        yield groups


def make(groups: ParallelGroups, kind: Any, linear: str, **fields: Any) -> tuple[Any, Site]:
    """A frozen linear with normal weights, and its site."""
    config = user_config()
    for name, value in fields.items():  # FP8 without a GPU is refused by the constructor
        setattr(config, name, value)
    options: dict[str, Any] = {"config": config, "init_method": config.init_method}
    options |= {"bias": False, "skip_bias_add": False, "is_expert": False}
    options |= {"gather_output": False}
    out_size, in_size = SPEC.target_shape(linear)
    torch.manual_seed(0)
    module = kind(in_size, out_size, **options)
    torch.nn.init.normal_(module.weight, std=0.1)
    return module.requires_grad_(False), make_site(SPEC, 0, linear, 0, 1)


def attached(module: Any, site: Site, **options: Any) -> AdapterBank:
    bank = AdapterBank([site], LORAS, dtype=torch.float32, device=torch.device("cpu"))
    attach([(site, module)], bank, **options)
    fill_bank(bank)
    return bank


@pytest.mark.parametrize(
    ("kind", "black_box", "mixin"),
    [
        (ColumnParallelLinear, False, MegatronLinearMixin),
        (ColumnParallelLinear, True, BlackBoxMixin),
        (TEColumnParallelLinear, False, BlackBoxMixin),
        (TELayerNormColumnParallelLinear, True, BlackBoxMixin),
    ],
)
def test_the_kind_follows_from_the_module(
    groups: ParallelGroups, kind: Any, black_box: bool, mixin: type
) -> None:
    module, site = make(groups, kind, "linear_qkv")
    keys = list(module.state_dict())
    attached(module, site, black_box=black_box)
    assert isinstance(module, mixin)
    assert isinstance(module, kind)
    assert list(module.state_dict()) == keys


def test_another_attachment_replaces_the_one_before(groups: ParallelGroups) -> None:
    module, site = make(groups, ColumnParallelLinear, "linear_qkv")
    x = torch.randn(12, 1, SPEC.hidden_size)
    found = []
    for black_box, mixin in ((False, MegatronLinearMixin), (True, BlackBoxMixin)) * 2:
        attached(module, site, black_box=black_box)
        assert type(module).__bases__ == (mixin, ColumnParallelLinear)
        with use_micro_batch(VIEW):
            found.append(module(x)[0])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    torch.testing.assert_close(found[0], found[1])


def test_without_a_micro_batch_or_a_target_it_is_the_base(groups: ParallelGroups) -> None:
    module, site = make(groups, TERowParallelLinear, "linear_proj")
    x = torch.randn(12, 1, module.weight.shape[1])
    base = module(x)[0]
    bank = attached(module, site)
    assert torch.equal(module(x)[0], base)
    with use_micro_batch(VIEW):
        assert not torch.equal(module(x)[0], base)
        bank.install([])
        assert torch.equal(module(x)[0], base)


def test_rows_that_are_not_the_micro_batch_s_are_refused(groups: ParallelGroups) -> None:
    module, site = make(groups, TEColumnParallelLinear, "linear_qkv")
    attached(module, site)
    with use_micro_batch(VIEW), pytest.raises(AssertionError, match=r"must be 12 .*, got 24"):
        module(torch.randn(12, 2, SPEC.hidden_size))


@pytest.mark.parametrize("kind", [TEColumnParallelLinear, TELayerNormColumnParallelLinear])
def test_adapters_compute_outside_fp8(groups: ParallelGroups, kind: Any) -> None:
    x = torch.randn(12, 1, SPEC.hidden_size)
    branches = []
    for fields in ({}, {"fp8": "e4m3", "fp8_recipe": "tensorwise"}):
        module, site = make(groups, kind, "linear_qkv", **fields)
        base = module(x)[0]
        attached(module, site)
        with use_micro_batch(VIEW):
            branches.append(module(x)[0] - base)
    plain, around_fp8 = branches
    assert plain[:9].norm(dim=-1).min() > 0
    torch.testing.assert_close(around_fp8, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("recipe", "expected"), [("tensorwise", 1), ("delayed", 3)])
def test_a_frozen_weight_is_quantised_once_unless_its_scale_is_delayed(
    groups: ParallelGroups, recipe: str, expected: int
) -> None:
    module, site = make(groups, TEColumnParallelLinear, "linear_qkv", fp8="e4m3", fp8_recipe=recipe)
    attached(module, site)
    for _ in range(3):
        module.is_first_microbatch = True  # as Megatron's schedules before every step
        for _ in range(2):
            with use_micro_batch(VIEW):
                module(torch.randn(12, 1, SPEC.hidden_size))
    assert module.num_quantisations == expected


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("is_rms", [False, True])
def test_the_norm_is_rounded_once(is_rms: bool, zero_centered: bool) -> None:
    torch.manual_seed(0)
    x, beta = (torch.randn(shape).bfloat16() for shape in ((40, 96), (96,)))
    gamma = (torch.randn(96) * 0.2 + (not zero_centered)).bfloat16()
    norm = InputNorm(gamma, None if is_rms else beta, 1e-5, is_rms, zero_centered)
    wide, weight = x.double(), gamma.double() + int(zero_centered)
    centred = wide if is_rms else wide - wide.mean(-1, keepdim=True)
    exact = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    exact = exact if is_rms else exact + beta.double()
    got = norm(x)
    assert got.dtype == torch.bfloat16
    # Half a unit in the last of 8 bits, and what fp32 adds to it: twice rounded is beyond.
    torch.testing.assert_close(got.double(), exact, rtol=2**-8 * 1.01, atol=1e-6)


def test_half_precision_factors_beside_a_wider_input(groups: ParallelGroups) -> None:
    """With an fp32 residual stream, Transformer Engine's norm gets fp32 and its weight is bf16."""
    module, site = make(groups, TELayerNormColumnParallelLinear, "linear_fc1")
    bank = AdapterBank([site], LORAS, dtype=torch.bfloat16, device=torch.device("cpu"))
    attach([(site, module)], bank)
    fill_bank(bank)
    x = torch.randn(12, 1, SPEC.hidden_size, requires_grad=True)
    with use_micro_batch(VIEW):
        y, _ = module(x)
    y.sum().backward()
    assert x.grad is not None
    assert (y.dtype, x.grad.dtype) == (torch.float32, torch.float32)
    assert all(adapter.slab.grad.isfinite().all() for adapter in bank.adapters)
