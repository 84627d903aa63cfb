"""The multi-adapter linear against its one-line definition, and around a foreign base."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear

from tests.helpers.built_model import LORAS, fill_bank
from tests.helpers.linear_case import JOBS, TOLERANCE, WORKLOADS, Case, error
from tests.helpers.one_process import one_process_groups
from tests.helpers.te_stand_in import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from tests.helpers.user_models import SPEC, user_config
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.linear import computes_base, multi_lora_linear
from tlora_megatron.layers.multi_adapter import (
    BlackBoxMixin,
    MegatronLinearMixin,
    attach,
    input_norm,
)
from tlora_megatron.layers.sites import Site, make_site
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.lora.torch_ops import TorchLinear
from tlora_megatron.ops.routing import Document, pack_micro_batch, use_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["dropout", "no dropout"])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("linear", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
def test_every_output_and_gradient_equals_the_reference(
    linear: str, workload: str, training: bool, dtype: torch.dtype
) -> None:
    case = Case(linear, dtype)
    lengths = WORKLOADS[workload]
    num_tokens = sum(lengths) + 6
    view = case.view(lengths, num_tokens=num_tokens, training=training)
    x = case.draw(num_tokens, 1, case.site.in_size)
    dy = case.draw(num_tokens, 1, case.site.out_size)
    actual, expected = case.run(x, dy, view), case.reference(x, dy, view)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        got = actual[name].reshape(value.shape)
        assert torch.isfinite(got).all(), name
        assert error(got, value) < TOLERANCE[dtype], name


def test_gradients_of_a_batch_under_way_survive_a_neighbour_leaving() -> None:
    case = Case("linear_fc1", torch.float32)
    view = case.view(WORKLOADS["distinct"], num_tokens=32, training=False)
    x = case.draw(32, 1, case.site.in_size)
    dy = case.draw(32, 1, case.site.out_size)
    alone = case.run(x, dy, view)
    case.run(x, dy, view)
    y = multi_lora_linear(x.requires_grad_(), case.weight, None, case.strategy, view)
    y.backward(dy)
    case.bank.install([a for a in case.bank.adapters if a.name != "job1"])
    after = case.gradients()
    assert after
    for name, grad in after.items():
        assert torch.equal(grad, alone[name]), name


def test_only_the_input_and_the_rank_sized_intermediate_are_saved() -> None:
    case = Case("linear_qkv", torch.float32)
    view = case.view(WORKLOADS["distinct"], num_tokens=40, training=True)
    x = case.draw(40, 1, case.site.in_size).requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        multi_lora_linear(x, case.weight, case.bias, case.strategy, view)
    owned = {t.data_ptr() for t in (x, case.weight)}
    extra = [t for t in saved if t.data_ptr() not in owned]
    # Rows times rank chunks over the targets on this linear: jobs 0 (q, v), 1, 2 (k), 3 (q, k, v).
    assert [t.numel() for t in extra] == [5 * 32 + 9 * 32 + 1 * 16 + 17 * 48]


def test_kernels_get_whole_rows_whatever_the_caller_s_strides() -> None:
    seen: list[torch.Tensor] = []

    class Recording(TorchLinear):
        def forward(self, x_TK: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(x_TK)
            return super().forward(x_TK, *rest)

        def backward_up(self, dy_TN: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.append(dy_TN)
            return super().backward_up(dy_TN, *rest)

        def backward_down(self, x_TK: torch.Tensor, *rest: Any) -> None:
            seen.append(x_TK)
            super().backward_down(x_TK, *rest)

    case = Case("linear_qkv", torch.float32, ops=SimpleNamespace(name="torch", bind=Recording))
    view = case.view(WORKLOADS["distinct"], num_tokens=40, training=True)
    x = case.draw(case.site.in_size, 1, 40).transpose(0, 2).requires_grad_()
    # A sum's gradient is one element, expanded.
    multi_lora_linear(x, case.weight, case.bias, case.strategy, view).sum().backward()
    assert [tensor.is_contiguous() for tensor in seen] == [True] * 3


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("slot", [1, 2])
def test_a_job_has_the_same_gradient_whoever_is_beside_it(slot: int, dtype: torch.dtype) -> None:
    loras = (LoraSpec(rank=256, alpha=1, target_modules=("q_proj", "linear_qkv")), *JOBS)
    case = Case("linear_qkv", dtype, loras=loras)
    x, dy = case.draw(64, 1, case.site.in_size), case.draw(64, 1, case.site.out_size)
    lengths = (16, 16, 16, 7, 9)
    company = case.run(x, dy, case.view(lengths, num_tokens=64, training=True))
    alone = [n if s == slot else 0 for s, n in enumerate(lengths)]
    first = [t.roll(-16 * slot, 0) for t in (x, dy)]
    loner = case.run(*first, case.view(alone, num_tokens=64, training=True))
    for name, grad in loner.items():
        if name.startswith(f"job{slot}."):
            assert grad.any(), name
            assert torch.equal(grad, company[name]), name


def test_an_adapter_that_joins_brings_no_gradient() -> None:
    case = Case("linear_fc1", torch.float32)
    first, *rest = case.bank.adapters
    case.bank.install(rest)
    for adapter in case.bank.adapters:
        adapter.slab.grad.fill_(1)
    first.slab.grad.fill_(1)
    case.bank.install([*rest, first])
    assert not first.slab.grad.any()
    assert all(adapter.slab.grad.all() for adapter in rest)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_that_no_job_adapts_is_computed_here_where_bits_are_a_jobs_own(bias: bool) -> None:
    """Having factors follows from the neighbours: the host's own GEMM must not run."""
    case = Case("linear_fc1", torch.float64, loras=())
    plain = pack_micro_batch([], num_slots=0, num_tokens=16)
    exact = replace(plain, exactness=Exactness())
    assert not computes_base(case.strategy, plain)
    assert computes_base(case.strategy, exact)
    x = case.draw(16, 1, case.site.in_size).requires_grad_()
    dy = case.draw(16, 1, case.site.out_size)
    bias_N = case.draw(case.site.out_size) if bias else None
    y = multi_lora_linear(x, case.weight, bias_N, case.strategy, exact)
    expected = torch.nn.functional.linear(x, case.weight, bias_N)
    torch.testing.assert_close(y, expected)
    grads = [torch.autograd.grad(out, x, dy)[0] for out in (y, expected)]
    torch.testing.assert_close(*grads)


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
    linear = SimpleNamespace(
        layer_norm_weight=gamma,
        layer_norm_bias=None if is_rms else beta,
        eps=1e-5,
        normalization="RMSNorm" if is_rms else "LayerNorm",
        zero_centered_gamma=zero_centered,
    )
    wide, weight = x.double(), gamma.double() + int(zero_centered)
    centred = wide if is_rms else wide - wide.mean(-1, keepdim=True)
    exact = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    exact = exact if is_rms else exact + beta.double()
    got = input_norm(linear, x)
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
