"""Multi-adapter linears: a mixin for each class of linear, and what makes existing ones such.

`attach` makes a linear an instance of one, which takes its host's calls as they come.
Those of Megatron's own linears also give their product without autograd (`product_vjp`).
DeepSpeed's are in `integrations.deepspeed.discover`.

A module keeps its parameters, state-dict keys, hooks and `isinstance` answers: only its class is
replaced by a subclass made from it, and its adapters hang on it outside module registration.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.linear import (
    Computed,
    GemmStrategy,
    LinearLayout,
    MultiLoRALinear,
    QuantisedInput,
    computes_base,
    multi_lora_linear,
    multi_lora_linear_vjp,
    with_vjp,
)
from tlora_megatron.layers.quantised_linear import held_codes
from tlora_megatron.layers.shardings import (
    BlackBoxStrategy,
    FoldStrategy,
    Norm,
    SLoraStrategy,
)
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.frozen.parts import NormWeight, Vjp
from tlora_megatron.ops.frozen.rms_norm import rms_norm_once_reference
from tlora_megatron.ops.lora.linear_ops import Base
from tlora_megatron.ops.routing import MicroBatchView, current_micro_batch
from tlora_megatron.parallel.collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from tlora_megatron.parallel.lanes import Lane, current_lane


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearAdapters:
    """The adapters of one linear, and where in it each of them is computed."""

    site: Site
    gemm: GemmStrategy | None
    """In the linear's GEMM; None = its GEMM is not ours."""
    output: BlackBoxStrategy | None = None
    """Added to what the linear returns."""


def product_adapters(bank: AdapterBank, site: Site, layout: LinearLayout) -> LinearAdapters:
    """Returns the adapters of a linear whose GEMM is ours, as the run's sharding has them."""
    if site.lora_sharding == "s_lora":
        return LinearAdapters(site=site, gemm=SLoraStrategy(bank, site, layout))
    if site.lora_sharding == "fold":
        return LinearAdapters(site=site, gemm=FoldStrategy(bank, site, layout))
    # Block-diagonal adapters exchange nothing: they stay in the linear's GEMM.
    return LinearAdapters(
        site=site,
        gemm=FoldStrategy(bank, site, layout, block_diagonal_only=True),
        output=BlackBoxStrategy(bank, site, layout),
    )


class MultiAdapter:
    """Base of all multi-adapter linears."""

    tlora_adapters: LinearAdapters

    def adapter_layout(self, site: Site) -> LinearLayout:
        """Returns how this linear is parallel."""
        raise NotImplementedError

    def bind_adapters(self, bank: AdapterBank, site: Site) -> None:
        """Makes a bank's adapters at a site this linear's, in the place of those before."""
        adapters = self._make_adapters(bank, site, self.adapter_layout(site))
        # No attribute that torch would register.
        object.__setattr__(self, "tlora_adapters", adapters)

    def _make_adapters(self, bank: AdapterBank, site: Site, layout: LinearLayout) -> LinearAdapters:
        return product_adapters(bank, site, layout)


class MegatronLinearMixin(MultiAdapter):
    """Overrides the GEMM of Megatron's Column- and RowParallelLinear; their reductions stay theirs.

    Relies on `_forward_impl(input, weight, *, bias, allreduce_dgrad, sequence_parallel, tp_group,
    ...)`, which both classes call with keywords in megatron-core 0.16 to 0.19.
    """

    def adapter_layout(self, site: Site) -> LinearLayout:
        linear: Any = self
        return LinearLayout(
            kind=site.kind,
            group=linear.tp_group,
            tp_size=site.tp_size,
            sequence_parallel=linear.sequence_parallel,
            reduces_dgrad=site.kind == "column" and linear.allreduce_dgrad,
        )

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        view, lane, adapters = current_micro_batch(), None, self.tlora_adapters
        if adapters.site.kind == "column":
            lane = current_lane()
            if lane is not None:
                input = lane.begin_compute(input)
                kwargs |= _ONE_RANK
        gemm = adapters.gemm
        if view is None or gemm is None or not computes_base(gemm, view):
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        return multi_lora_linear(
            input, held_codes(self) or weight, kwargs.get("bias"), gemm, view, lane
        )

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Does what Megatron's does; a nano-batch's lane reduces a row-parallel product for it."""
        lane, adapters = current_lane(), self.tlora_adapters
        if lane is not None and adapters.site.kind == "row":
            linear: Any = self
            y = self._forward_impl(input_, linear.weight, bias=None, **_ONE_RANK)
            y, bias = lane.end_compute(y), linear.bias
            return (y, bias) if bias is None or linear.skip_bias_add else (y + bias, None)
        y, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        return _add_branch(adapters.output, input_, y), bias

    def product_vjp(
        self, x: Tensor | QuantisedInput, view: MicroBatchView, lane: Lane | None
    ) -> tuple[Tensor, Vjp]:
        """Returns what `forward` does, without autograd and in two dimensions, and the way back.

        Relies on what `ModelSpec`s are built of: outputs are not gathered, and a row-parallel
        linear adds its bias itself. A lane, which has gathered x or its codes, reduces y and dx;
        there a row-parallel linear has no bias.
        """
        linear: Any = self
        base = held_codes(linear) or linear.weight
        return product_vjp(base, linear.bias, self.tlora_adapters, x, view, lane)


def product_vjp(
    base: Base,
    bias_N: Tensor | None,
    adapters: LinearAdapters,
    x: Tensor | QuantisedInput,
    view: MicroBatchView,
    lane: Lane | None,
) -> tuple[Tensor, Vjp]:
    """Returns the product of a parallel linear and its adapters, and the way back.

    Args:
        bias_N: of a row-parallel linear it is added behind the reduction; there is no lane then.
        x: `[T, K]`, gathered where there is a lane, which then also reduces y and dx.
    """
    gemm, output = adapters.gemm, adapters.output
    assert gemm is not None, "the GEMM is somebody else's"
    is_row = gemm.layout.kind == "row"
    product = multi_lora_linear_vjp(x, base, None if is_row else bias_N, gemm, view, lane)
    if is_row and lane is None:
        y, vjp = reduced(*product, gemm.layout)
        product = (y if bias_N is None else y + bias_N, vjp)
    if output is None or output.factors is None:
        return product
    assert isinstance(x, Tensor), "a branch behind the GEMM is made of x itself"
    base_y, base_back = product
    y, branch_back = with_vjp(output.forward(x, base_y, view))
    return y, lambda dy: branch_back(dy).add_(base_back(dy))


def reduced(y: Tensor, vjp: Vjp, layout: LinearLayout) -> tuple[Tensor, Vjp]:
    """Reduces a row-parallel linear's partial sums; returns the sum, or its rows, and the vjp."""
    group = layout.group
    if layout.tp_size == 1:
        return y, vjp
    if not layout.sequence_parallel:
        return all_reduce(y, group).wait(), vjp
    return reduce_scatter_rows(y, group).wait(), lambda dy: vjp(all_gather_rows(dy, group))


_ONE_RANK: dict[str, Any] = {
    "gradient_accumulation_fusion": False,
    "allreduce_dgrad": False,
    "sequence_parallel": False,
    "tp_group": None,
}
"""Arguments that a parallel linear gives its GEMM where nothing is communicated."""


def _add_branch(
    output: BlackBoxStrategy | None, x: Tensor, base_y: Tensor, norm: Norm | None = None
) -> Tensor:
    """Adds the adapters' branch, of the bound micro-batch, to what a linear has returned."""
    view = current_micro_batch()
    if output is None or view is None or output.factors is None:
        return base_y

    def compute(x_WK: Tensor) -> Computed:
        return output.forward(x_WK, base_y.flatten(0, -2), view, norm)

    return MultiLoRALinear.apply(x, base_y, compute)


class BlackBoxMixin(MultiAdapter):
    """Adds the branch to what a parallel linear of any making returns.

    Relies on what Transformer Engine's layers and Megatron's own have in megatron-core 0.16 to
    0.20: `forward(x)` gives `(y, bias or None)`; `_tp_group` or `tp_group`, `sequence_parallel`;
    and where a norm comes first `layer_norm_weight`, `layer_norm_bias`, `eps`, `normalization`,
    `zero_centered_gamma`.
    """

    def adapter_layout(self, site: Site) -> LinearLayout:
        return LinearLayout(
            kind=site.kind,
            group=getattr(self, "_tp_group", None) or getattr(self, "tp_group", None),
            tp_size=site.tp_size,
            sequence_parallel=bool(getattr(self, "sequence_parallel", False)),
        )

    def _make_adapters(self, bank: AdapterBank, site: Site, layout: LinearLayout) -> LinearAdapters:
        return LinearAdapters(site=site, gemm=None, output=BlackBoxStrategy(bank, site, layout))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Returns `[W, 1, N]` of `[W, 1, K]`, and the bias that the caller adds, or None."""
        _keep_quantised_weight(self)
        weight_K, norm = getattr(self, "layer_norm_weight", None), None
        if weight_K is not None:
            x = x.to(weight_K.dtype)  # of an fp32 residual stream, as Megatron does from 0.20
            norm = functools.partial(input_norm, self)
        y, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if not hasattr(self, "tlora_adapters"):
            return y, bias  # prepared, and the base is scored before it has adapters
        return _add_branch(self.tlora_adapters.output, x, y, norm), bias


def input_norm(linear: Any, x: Tensor) -> Tensor:
    """Normalises `[..., K]` in fp32, rounded once, as a linear does that begins with a norm."""
    weight_K, eps, zero_centered = linear.layer_norm_weight, linear.eps, linear.zero_centered_gamma
    if linear.normalization == "RMSNorm":
        return rms_norm_once_reference(x, NormWeight(weight_K, eps, zero_centered))
    bias_K, wide = getattr(linear, "layer_norm_bias", None), x
    if zero_centered or weight_K.dtype != x.dtype:
        # torch's norms of one dtype are fp32 inside, in a pass; 1 + weight would be rounded.
        weight_K = weight_K.float() + zero_centered
        bias_K = None if bias_K is None else bias_K.float()
        wide = x.float()
    return F.layer_norm(wide, weight_K.shape, weight_K, bias_K, eps).to(x.dtype)


def _keep_quantised_weight(module: Any) -> None:
    """Makes Transformer Engine quantise a frozen weight to FP8 in the first training step only.

    Megatron has it do so in the first micro-batch of every step, for weights that move. Nothing
    changes with delayed scaling, whose first scale is a guess that the next steps correct.
    """
    config = getattr(module, "config", None)
    if not getattr(config, "fp8", None) or getattr(config, "fp8_recipe", None) == "delayed":
        return
    if not module.training or not hasattr(module, "is_first_microbatch"):
        return
    if "tlora_trained_once" in module.__dict__:
        module.is_first_microbatch = False
    else:
        object.__setattr__(module, "tlora_trained_once", True)


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
        ours = (MegatronLinearMixin, BlackBoxMixin)
        if not isinstance(module, MultiAdapter) or isinstance(module, ours):
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
