"""Turns existing parallel linears into multi-adapter ones, in place.

A module keeps its parameters, state-dict keys, hooks and `isinstance` answers: only its class is
replaced by a subclass made from it, and its branch hangs on it outside module registration.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.linear import (
    AdapterBranch,
)
from tlora_megatron.layers.multi_adapter import (
    BlackBoxMixin,
    MultiAdapter,
    MultiAdapterMixin,
    RankExchangeMixin,
    RankShardedMixin,
)
from tlora_megatron.layers.rank_sharded import (
    LocalBranch,
    ShardedBranch,
)
from tlora_megatron.layers.sites import Site


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
        sharding = _attachment(site, module, bank, black_box=black_box)
        if sharding != "prepared":
            mixin = _MIXINS[sharding]
            if isinstance(module, MultiAdapter) and mixin not in type(module).__bases__:
                _take_off(module)
            make_multi_adapter(module, mixin)
        branch = ShardedBranch if sharding == "s_lora" else AdapterBranch
        object.__setattr__(module, "tlora_branch", branch(bank, site))
        if sharding == "rank_exchange":
            object.__setattr__(module, "tlora_local", LocalBranch(bank, site))


def _attachment(site: Site, module: nn.Module, bank: AdapterBank, *, black_box: bool) -> str:
    """How the branch is attached: a key of `_MIXINS`, or "prepared" where an integration has made
    the linear a multi-adapter one that reduces by itself."""
    if isinstance(module, MultiAdapter) and not isinstance(module, tuple(_MIXINS.values())):
        return "prepared"
    if not black_box and hasattr(module, "_forward_impl"):
        return site.lora_sharding
    if site.tp_size > 1 and bank.is_cut_by_rank(site):
        raise ValueError(_uncut("lora.parametrization", module))
    if site.lora_sharding == "s_lora":
        raise ValueError(
            f"parallel.lora_sharding must be rank_exchange or auto around a "
            f"{type(module).__name__}, whose reduction is its own, got s_lora"
        )
    return "black box"


def check_blocks_fit(job: str, lora: LoraSpec, linears: Iterable[tuple[Site, nn.Module]]) -> None:
    """Refuses a block-diagonal job, by name, where `attach` would refuse its linears.

    Raises:
        ValueError: for linears that reduce over TP themselves.
    """
    for site, module in linears:
        targeted = any(shard.target in lora.target_modules for shard in site.targets)
        if not (lora.is_block_diagonal and targeted and site.tp_size > 1):
            continue
        if not isinstance(module, MultiAdapter) and not hasattr(module, "_forward_impl"):
            raise ValueError(_uncut(f"lora.parametrization of job {job!r}", module))


def _uncut(what: str, module: nn.Module) -> str:
    return (
        f"{what} must be standard with tp_size above 1 around a {type(module).__name__}, whose "
        f"reduction is its own, got block_diagonal; build the model of Megatron's own linears, or "
        f"set tp_size to 1"
    )


_MIXINS: dict[str, type[MultiAdapter]] = {
    "black box": BlackBoxMixin,
    "fold": MultiAdapterMixin,
    "rank_exchange": RankExchangeMixin,
    "s_lora": RankShardedMixin,
}
"""By how the branch is attached."""


def _take_off(module: nn.Module) -> None:
    """Makes a multi-adapter linear what it was, for a branch of another kind."""
    module.__class__ = type(module).__bases__[1]
