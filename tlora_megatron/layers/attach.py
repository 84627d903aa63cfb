"""Turns existing parallel linears into multi-adapter ones, in place.

A module keeps its parameters, state-dict keys, hooks and `isinstance` answers: only its class is
replaced by a subclass made from it, and its adapters hang on it outside module registration.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import BlackBoxMixin, MegatronLinearMixin, MultiAdapter
from tlora_megatron.layers.sites import Site

_MIXINS = (MegatronLinearMixin, BlackBoxMixin)
"""Those that `attach` chooses between."""


@functools.cache
def _multi_adapter_class(mixin: Any, base: Any) -> type[nn.Module]:
    return type(f"MultiLoRA{base.__name__}", (mixin, base), {"__module__": __name__})


def make_multi_adapter(module: Any, mixin: Any) -> MultiAdapter:
    """Turns a linear into a multi-adapter one, in place; one of another mixin changes that."""
    if not isinstance(module, mixin):
        base = type(module).__bases__[1] if isinstance(module, MultiAdapter) else type(module)
        module.__class__ = _multi_adapter_class(mixin, base)
    return module


def attach(
    linears: Iterable[tuple[Site, nn.Module]], bank: AdapterBank, *, black_box: bool = False
) -> None:
    """Gives every linear its adapters; attaching the same linear again replaces them.

    What is not a multi-adapter linear yet becomes one: Megatron's own by their GEMM, others
    (Transformer Engine's) around their forward. Those that an integration has prepared stay so.

    Args:
        black_box: Megatron's own around their forward too.

    Raises:
        ValueError: for block-diagonal jobs around linears that reduce over TP themselves.
    """
    for site, module in linears:
        linear: Any = module
        if not isinstance(module, MultiAdapter) or isinstance(module, _MIXINS):
            mixin: type[MultiAdapter] = MegatronLinearMixin
            if black_box or not hasattr(module, "_forward_impl"):
                _check_black_box(site, module, bank)
                mixin = BlackBoxMixin
            linear = make_multi_adapter(module, mixin)
        linear.bind_adapters(bank, site)


def _check_black_box(site: Site, module: nn.Module, bank: AdapterBank) -> None:
    if site.tp_size > 1 and bank.is_rank_sharded(site):
        raise ValueError(_uncut("lora.parametrization", module))
    if site.lora_sharding == "s_lora":
        raise ValueError(
            f"parallel.lora_sharding must be rank_exchange or auto around a "
            f"{type(module).__name__}, whose reduction is its own, got s_lora"
        )


def check_blocks_fit(job: str, lora: LoraSpec, linears: Iterable[tuple[Site, nn.Module]]) -> None:
    """Refuses a block-diagonal job, by name, where `attach` would refuse its linears.

    Raises:
        ValueError: for linears that reduce over TP themselves.
    """
    for site, module in linears:
        targeted = any(shard.target in lora.target_modules for shard in site.targets)
        if not (lora.is_block_diagonal and targeted and site.tp_size > 1):
            continue
        is_prepared = isinstance(module, MultiAdapter) and not isinstance(module, BlackBoxMixin)
        if not is_prepared and not hasattr(module, "_forward_impl"):
            raise ValueError(_uncut(f"lora.parametrization of job {job!r}", module))


def _uncut(what: str, module: nn.Module) -> str:
    return (
        f"{what} must be standard with tp_size above 1 around a {type(module).__name__}, whose "
        f"reduction is its own, got block_diagonal; build the model of Megatron's own linears, or "
        f"set tp_size to 1"
    )
