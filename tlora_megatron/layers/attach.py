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

from tlora_megatron.job import LoraSpec
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.black_box import (
    BlackBoxBranch,
    Exchange,
    InputNorm,
    black_box_vjp,
)
from tlora_megatron.layers.linear import (
    AdapterBranch,
    MultiLoRALinear,
    TensorParallel,
    multi_lora_linear_vjp,
)
from tlora_megatron.layers.overlapped_linear import OverlappedLinear, Traffic
from tlora_megatron.layers.rank_sharded import (
    LocalBranch,
    RankShardedLinear,
    ShardedBranch,
    rank_sharded_linear_vjp,
)
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.frozen_parts import Vjp
from tlora_megatron.ops.segments import MicroBatchView, current_micro_batch
from tlora_megatron.parallel.collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from tlora_megatron.parallel.lanes import Lane, current_lane


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
        view, lane, branch = current_micro_batch(), current_lane(), self.tlora_branch
        if lane is None or branch.site.kind != "column":
            tp = _tensor_parallel(kwargs)
        else:
            tp = _tensor_parallel(kwargs, lane)
            input = lane.enter(input)
            kwargs |= _ONE_RANK
        if view is None or branch.factors is None:
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        return MultiLoRALinear.apply(input, weight, kwargs.get("bias"), branch, view, tp)

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """As Megatron's; of nano-batches, their lanes or the linear itself reduce the products."""
        view, lane = current_micro_batch(), current_lane()
        linear: Any = self
        if lane is None and view is not None and view.nano_views:
            return self._forward_overlapped(input_, view)
        if lane is None or self.tlora_branch.site.kind == "column":
            return super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        y = self._forward_impl(input_, linear.weight, bias=None, **_ONE_RANK)
        return _add_bias(linear, lane.leave(y))

    def product_vjp(
        self, x: torch.Tensor, view: MicroBatchView, lane: Lane | None
    ) -> tuple[torch.Tensor, Vjp]:
        """What `forward` gives, without autograd and in two dimensions, and the way back.

        Relies on what `ModelSpec`s are built of: outputs are not gathered, and a row-parallel
        linear has no bias. A lane, which has gathered x, reduces y and dx.
        """
        linear: Any = self
        weight, branch = linear.weight, self.tlora_branch
        if branch.site.kind == "column":
            tp = TensorParallel(
                linear.tp_group, linear.sequence_parallel, linear.allreduce_dgrad, lane
            )
            return multi_lora_linear_vjp(x, weight, linear.bias, branch, view, tp)
        tp = TensorParallel(None, gather_input=False, reduce_dgrad=False, lane=lane)
        y, vjp = multi_lora_linear_vjp(x, weight, None, branch, view, tp)
        return (y, vjp) if lane is not None else _reduced(linear, y, vjp)

    def _forward_overlapped(
        self, x: torch.Tensor, view: MicroBatchView
    ) -> tuple[torch.Tensor, Any]:
        linear: Any = self
        is_column = self.tlora_branch.site.kind == "column"
        traffic = Traffic(
            overlap=linear.tlora_overlap,
            is_column=is_column,
            sequence_parallel=linear.sequence_parallel,
            num_ranks=self.tlora_branch.site.tp_size,
        )
        # A column-parallel bias is sharded like the product and goes into it.
        bias = None if linear.skip_bias_add or not is_column else linear.bias
        y = OverlappedLinear.apply(x, linear.weight, bias, self.tlora_branch, view, traffic)
        if is_column:
            return y, linear.bias if linear.skip_bias_add else None
        return _add_bias(linear, y)


def _reduced(linear: Any, y: torch.Tensor, vjp: Vjp) -> tuple[torch.Tensor, Vjp]:
    """A row-parallel linear's whole result, or this rank's rows of it, and the way back."""
    group = linear.tp_group
    if linear.tlora_branch.site.tp_size == 1:
        return y, vjp
    if not linear.sequence_parallel:
        return all_reduce(y, group).wait(), vjp
    return reduce_scatter_rows(y, group).wait(), lambda dy: vjp(all_gather_rows(dy, group))


def _add_bias(linear: Any, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A row-parallel linear's result, and the bias if the caller is to add it."""
    if linear.bias is None or linear.skip_bias_add:
        return y, linear.bias
    return y + linear.bias, None


_ONE_RANK: dict[str, Any] = {
    "gradient_accumulation_fusion": False,
    "allreduce_dgrad": False,
    "sequence_parallel": False,
    "tp_group": None,
}
"""What a parallel linear gives its GEMM where nothing is communicated."""


def _tensor_parallel(kwargs: dict[str, Any], lane: Lane | None = None) -> TensorParallel:
    """From what Megatron's parallel linears give their GEMM."""
    return TensorParallel(
        group=kwargs.get("tp_group"),
        gather_input=kwargs["sequence_parallel"],
        reduce_dgrad=kwargs["allreduce_dgrad"],
        lane=lane,
    )


class RankShardedMixin(MultiAdapter):
    """As `MultiAdapterMixin`, with standard adapters sharded as S-LoRA does."""

    tlora_branch: ShardedBranch
    tp_group: Any

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        view = current_micro_batch()
        if view is None or self.tlora_branch.factors is None:
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        # A row-parallel linear gives its GEMM no group: it reduces afterwards.
        tp = _tensor_parallel(kwargs)._replace(group=self.tp_group)
        bias = kwargs.get("bias")
        return RankShardedLinear.apply(input, weight, bias, self.tlora_branch, view.rows, tp)

    def product_vjp(
        self, x: torch.Tensor, view: MicroBatchView, lane: Lane | None
    ) -> tuple[torch.Tensor, Vjp]:
        """As `MultiAdapterMixin`'s; there are no lanes for it."""
        linear: Any = self
        is_column = self.tlora_branch.site.kind == "column"
        tp = TensorParallel(
            linear.tp_group,
            gather_input=is_column and linear.sequence_parallel,
            reduce_dgrad=is_column and linear.allreduce_dgrad,
        )
        bias = linear.bias if is_column else None
        y, vjp = rank_sharded_linear_vjp(x, linear.weight, bias, self.tlora_branch, view, tp)
        return (y, vjp) if is_column else _reduced(linear, y, vjp)


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


class RankExchangeMixin(BlackBoxMixin):
    """Adds standard adapters' branch around Megatron's own linears, as around a black box.

    Block-diagonal adapters exchange nothing: they stay in the linear's GEMM.
    """

    tlora_local: LocalBranch

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        view = current_micro_batch()
        if view is None or self.tlora_local.factors is None:
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        tp, bias = _tensor_parallel(kwargs), kwargs.get("bias")
        return MultiLoRALinear.apply(input, weight, bias, self.tlora_local, view, tp)

    def product_vjp(
        self, x: torch.Tensor, view: MicroBatchView, lane: Lane | None
    ) -> tuple[torch.Tensor, Vjp]:
        """As `MultiAdapterMixin`'s; there are no lanes for it."""
        linear: Any = self
        is_column, is_cut = self.tlora_branch.site.kind == "column", linear.sequence_parallel
        tp = TensorParallel(
            linear.tp_group if is_column else None,
            gather_input=is_column and is_cut,
            reduce_dgrad=is_column and linear.allreduce_dgrad,
        )
        bias = linear.bias if is_column else None
        y, vjp = multi_lora_linear_vjp(x, linear.weight, bias, self.tlora_local, view, tp)
        if not is_column:
            y, vjp = _reduced(linear, y, vjp)
        exchange = Exchange(linear.tp_group, is_column, is_cut)
        return black_box_vjp(x, y, vjp, self.tlora_branch, view, exchange)


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
