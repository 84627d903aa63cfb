"""Megatron's layer of experts as a script builds it, and ours: the same weights and adapters."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from tests.helpers import te_stand_in
from tests.helpers.built_model import MOE_LORAS, fill_bank
from tests.helpers.user_models import EXPERTS_SPEC, user_config
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.integrations.megatron import cpu
from tlora_megatron.integrations.megatron.built.expert_layers import adapt_experts
from tlora_megatron.integrations.megatron.layer.frozen_experts import FrozenExperts
from tlora_megatron.integrations.megatron.layer.modules import built_class
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.routing import Document, pack_micro_batch, use_micro_batch

SPEC = replace(EXPERTS_SPEC, num_layers=1)
LORAS = (
    *MOE_LORAS,
    LoraSpec(rank=2, target_modules=("q_proj",)),
    replace(MOE_LORAS[1], expert_rank=5, expert_sharing="none"),
    LoraSpec(rank=17, expert_sharing="outer", target_modules=("experts.linear_fc1",)),
    LoraSpec(rank=4, expert_sharing="outer", target_modules=("experts.down_proj",)),
)
_LINEARS = ("linear_fc1", "linear_fc2")


def make_bank(dtype: torch.dtype, device: torch.device) -> AdapterBank:
    """Adapters on experts, with factors of their own and with shared ones, and one on attention."""
    sites = stage_sites(SPEC, ParallelLayout(), tp_rank=0, pp_rank=0)
    bank = AdapterBank(sites, LORAS, dtype=dtype, device=device)
    fill_bank(bank, SPEC, LORAS)
    return bank


def layer_config(**options: Any) -> Any:
    return user_config(
        num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=SPEC.ffn_size,
        moe_router_load_balancing_type="none", **options,
    )  # fmt: skip


def frozen(bank: AdapterBank, like: FrozenExperts | None = None) -> FrozenExperts:
    assert SPEC.experts is not None
    config = layer_config(params_dtype=bank.dtype)
    layer = FrozenExperts(config, spec=SPEC.experts, ep_size=1, expert_tp=1)
    pairs = [(layer.router.weight, None if like is None else like.router.weight)]
    for name in _LINEARS:
        source = None if like is None else getattr(like.experts, name).stacked
        pairs.append((getattr(layer.experts, name).stacked, source))
    for to, source in pairs:
        to.data.normal_(std=0.2) if source is None else to.data.copy_(source)
    for site in bank.sites:
        if site.experts is not None:
            name = site.linear.replace("experts_", "linear_")
            getattr(layer.experts, name).bind_adapters(bank, site)
    return layer


def megatrons(kind: str, like: FrozenExperts, bank: AdapterBank, **options: Any) -> Any:
    """Megatron's layer with the weights of ours: `CLASS DISPATCHER`.

    Without a GPU Transformer Engine's linears are the stand-in's.
    """
    linears, dispatcher = kind.split()
    grouped, on_gpu = linears == "TEGroupedMLP", torch.cuda.is_available()
    cpu.install_dispatchers()
    if grouped and on_gpu:
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=4, moe_grouped_gemm=True)
    else:
        spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    if grouped and not on_gpu:
        te_stand_in.use_in_experts(spec)
    config = layer_config(
        moe_token_dispatcher_type=dispatcher,
        params_dtype=bank.dtype,
        bf16=bank.dtype == torch.bfloat16,
        **options,
    )
    mlp: Any = spec.submodules.mlp  # from megatron-core 0.19.2 on a `functools.partial`
    is_partial = isinstance(mlp, functools.partial)
    layer: Any = mlp(config=config) if is_partial else build_module(mlp, config=config)
    layer.set_layer_number(1)
    layer.to(bank.device).requires_grad_(False)
    layer.router.weight.data.copy_(like.router.weight)
    for number in range(4):
        for name in _LINEARS:
            if grouped:
                to = getattr(getattr(layer.experts, name), f"weight{number}")
            else:
                to = getattr(layer.experts.local_experts[number], name).weight
            to.data.copy_(getattr(like.experts, name).stacked[number])
    experts = adapt_experts(layer)
    assert adapt_experts(layer) is experts  # a second time
    assert built_class(experts).__name__ == linears
    attach([(site, experts) for site in bank.sites if site.experts is not None], bank)
    return layer


def run_packed(layer: Any, x: Tensor, dy: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The output of a packed micro-batch, and the gradient of its input.

    Args:
        rows: of each adapter; the rest is padding.
    """
    documents = [Document(slot=slot, length=count) for slot, count in enumerate(rows)]
    view = pack_micro_batch(documents, num_slots=len(rows), num_tokens=len(x))
    leaf = x.clone().requires_grad_()
    with use_micro_batch(view):
        y, _ = layer(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def errors(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], *banks: AdapterBank
) -> dict[str, float]:
    """Errors of y, dx and all gradients on experts, by norm: elements are sums of any size.

    Args:
        banks: of what was found, and of what was expected.
    """
    pairs = {"y": (found[0], expected[0]), "dx": (found[1], expected[1])}
    for slot, (ours, theirs) in enumerate(zip(*(b.adapters for b in banks), strict=True)):
        grads = theirs.slab.grad_views
        for name, grad in ours.slab.grad_views.items():
            if ".experts." in name:
                pairs[f"{slot}: {name}"] = (grad, grads[name])
    return {
        name: float((got.float() - wanted.float()).norm() / wanted.float().norm())
        for name, (got, wanted) in pairs.items()
    }
