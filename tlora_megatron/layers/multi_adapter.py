"""What a parallel linear becomes that has adapters: a subclass by how they are computed and shared.

Each takes Megatron's calls as they come; those of Megatron's own linears also give their product
without autograd (`product_vjp`). Which one a linear gets is up to `layers.attach`.
"""

from __future__ import annotations

from typing import Any

import torch

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
from tlora_megatron.layers.rank_sharded import (
    LocalBranch,
    RankShardedLinear,
    ShardedBranch,
    rank_sharded_linear_vjp,
)
from tlora_megatron.ops.frozen.frozen_parts import Vjp
from tlora_megatron.ops.routing.segments import MicroBatchView, current_micro_batch
from tlora_megatron.parallel.collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from tlora_megatron.parallel.nano.lanes import Lane, current_lane


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
        """As Megatron's; the lane of a nano-batch reduces the product in the linear's place."""
        lane = current_lane()
        linear: Any = self
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
