"""Turns existing parallel linears into multi-adapter ones, in place.

A module keeps its parameters, state-dict keys, hooks and `isinstance` answers: only its class is
replaced by a subclass made from it, and its branch hangs on it outside module registration.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.black_box import BlackBoxBranch, Exchange, InputNorm
from tlora_megatron.layers.linear import AdapterBranch, MultiLoRALinear, TensorParallel
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.segments import current_micro_batch


class MultiAdapter:
    """What every kind of multi-adapter linear is."""

    tlora_branch: AdapterBranch


class MultiAdapterMixin(MultiAdapter):
    """Overrides the GEMM of Megatron's Column- and RowParallelLinear; their reductions stay theirs.

    Relies on `_forward_impl(input, weight, *, bias, allreduce_dgrad, sequence_parallel, tp_group,
    ...)`, which both classes call with keywords in megatron-core 0.16 to 0.19.
    """

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        view = current_micro_batch()
        if view is None or self.tlora_branch.factors is None:
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        tp = TensorParallel(
            group=kwargs.get("tp_group"),
            gather_input=kwargs["sequence_parallel"],
            reduce_dgrad=kwargs["allreduce_dgrad"],
        )
        return MultiLoRALinear.apply(input, weight, kwargs.get("bias"), self.tlora_branch, view, tp)


class BlackBoxMixin(MultiAdapter):
    """Adds the branch to what a parallel linear of any making returns.

    Relies on what Transformer Engine's layers and Megatron's own have in megatron-core 0.16 to
    0.20: `forward(x)` gives `(y, bias or None)`; `_tp_group` or `tp_group`, `sequence_parallel`;
    and where a norm comes first `layer_norm_weight`, `layer_norm_bias`, `eps`, `normalization`,
    `zero_centered_gamma`.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """`[W, 1, K]` to `[W, 1, N]` and the bias that the caller adds, or None."""
        _keep_quantised_weight(self)
        y, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        view = current_micro_batch()
        if view is None or self.tlora_branch.factors is None:
            return y, bias
        exchange = Exchange(
            group=getattr(self, "_tp_group", None) or getattr(self, "tp_group", None),
            is_column=self.tlora_branch.site.kind == "column",
            sequence_parallel=bool(getattr(self, "sequence_parallel", False)),
        )
        norm = _input_norm(self)
        return BlackBoxBranch.apply(x, y, self.tlora_branch, view, exchange, norm), bias


def _input_norm(module: Any) -> InputNorm | None:
    weight_K = getattr(module, "layer_norm_weight", None)
    if weight_K is None:
        return None
    return InputNorm(
        weight_K=weight_K,
        bias_K=getattr(module, "layer_norm_bias", None),
        eps=module.eps,
        is_rms=module.normalization == "RMSNorm",
        zero_centered=module.zero_centered_gamma,
    )


def _keep_quantised_weight(module: Any) -> None:
    """Lets a frozen weight be quantised to FP8 in the first training step only.

    Megatron has Transformer Engine do so in the first micro-batch of every step, for weights that
    move. Not with delayed scaling, whose first scale is a guess that the next steps correct.
    """
    config = getattr(module, "config", None)
    if not getattr(config, "fp8", None) or getattr(config, "fp8_recipe", None) == "delayed":
        return
    if not module.training or not hasattr(module, "is_first_microbatch"):
        return
    if "tlora_quantised" in module.__dict__:
        module.is_first_microbatch = False
    object.__setattr__(module, "tlora_quantised", True)


@functools.cache
def _multi_adapter_class(mixin: Any, base: Any) -> type[nn.Module]:
    return type(f"MultiLoRA{base.__name__}", (mixin, base), {"__module__": __name__})


def make_multi_adapter(module: nn.Module, mixin: type[MultiAdapter] = MultiAdapterMixin) -> None:
    """Turns a linear into a multi-adapter one, in place; one that is one already stays as it is."""
    if not isinstance(module, MultiAdapter):
        parts: list[Any] = [mixin, type(module)]
        module.__class__ = _multi_adapter_class(*parts)


def attach(
    linears: Iterable[tuple[Site, nn.Module]], bank: AdapterBank, *, black_box: bool = False
) -> None:
    """Gives every linear its branch; attaching the same linear again replaces its branch.

    What is not a multi-adapter linear yet becomes one: Megatron's own by their GEMM, others
    (Transformer Engine's) around their forward.

    Args:
        black_box: Megatron's own around their forward too.

    Raises:
        ValueError: for block-diagonal jobs around linears that reduce over TP themselves.
    """
    for site, module in linears:
        around = black_box or not hasattr(module, "_forward_impl")
        if not isinstance(module, MultiAdapter):
            make_multi_adapter(module, BlackBoxMixin if around else MultiAdapterMixin)
        if isinstance(module, BlackBoxMixin) and site.tp_size > 1 and bank.is_cut_by_rank(site):
            raise ValueError(
                f"lora.parametrization must be standard with tp_size above 1 around linears that "
                f"reduce over TP themselves, got block_diagonal on a {type(module).__name__}; "
                f"build the model of Megatron's own linears, or set tp_size to 1"
            )
        object.__setattr__(module, "tlora_branch", AdapterBranch(bank, site))
