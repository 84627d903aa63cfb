"""Transformer Engine's parallel linears as megatron-core wraps them, on the CPU.

Not its kernels but its contract, read off megatron-core 0.16 to 0.20
(`extensions/transformer_engine.py`) and Transformer Engine 2.17 (`module/linear.py`,
`module/layernorm_linear.py`): constructors, attributes, layouts under tensor and sequence
parallelism, which collective runs where, outputs that are views made inside an autograd function,
`(y, bias or None)`, and FP8 weights that are quantised where `is_first_microbatch` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from tlora_megatron.parallel.collectives import all_gather_rows, reduce_scatter_rows


def quantised(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Rounds to FP8 with a scale of the whole tensor, and back."""
    scale = torch.finfo(dtype).max / x.abs().max().clamp(min=1e-12)
    return (x * scale).to(dtype).to(x.dtype) / scale


def use_in(layer: Any) -> None:
    """Turns Megatron's local spec of a layer into what its Transformer Engine spec is."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    for module, column, row in (
        (parts.self_attention, "linear_qkv", "linear_proj"),
        (parts.mlp, "linear_fc1", "linear_fc2"),
    ):
        # From megatron-core 0.19.2 on an MLP's spec is a `functools.partial`.
        inner = getattr(module, "keywords", vars(module))["submodules"]
        setattr(inner, column, TELayerNormColumnParallelLinear)
        setattr(inner, row, TERowParallelLinear)


def use_in_experts(layer: Any) -> None:
    """Gives a local spec of a layer with experts Megatron's `TEGroupedMLP`, over the grouped
    linears of this module."""
    moe = layer.submodules.mlp
    inner = getattr(moe, "keywords", vars(moe))["submodules"]
    linears: dict[str, Any] = {
        "linear_fc1": TEColumnParallelGroupedLinear,
        "linear_fc2": TERowParallelGroupedLinear,
    }
    if isinstance(inner.experts, ModuleSpec):
        parts: Any = MLPSubmodules(**linears)
        inner.experts = ModuleSpec(module=experts.TEGroupedMLP, submodules=parts)
    else:  # from megatron-core 0.19 on
        parts = experts.GroupedMLPSubmodules(**linears)
        inner.experts = functools.partial(experts.TEGroupedMLP, submodules=parts)


class _Linear(torch.autograd.Function):
    """The frozen-weight path: input, norm and weight are all that is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: Any) -> Tensor:
        normed = module.norm(x)
        inputs = normed.flatten(0, -2)
        if module.fp8:
            inputs = quantised(inputs)
        if module.gathers_input:
            inputs = all_gather_rows(inputs, module.tp_group)
        out = F.linear(inputs, weight, None if module.parallel_mode == "row" else bias)
        if module.parallel_mode == "row" and module.tp_size > 1:
            if module.sequence_parallel:
                out = reduce_scatter_rows(out, module.tp_group).wait()
            else:
                dist.all_reduce(out, group=module.tp_group)
        if module.parallel_mode == "row" and bias is not None:
            out = out + bias
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return out.view(-1, *x.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), module = ctx.saved_tensors, ctx.module
        dy = dy.flatten(0, -2)
        if module.fp8:
            dy = quantised(dy, torch.float8_e5m2)
        if module.parallel_mode == "row" and module.sequence_parallel:
            dy = all_gather_rows(dy, module.tp_group)
        dx = dy @ weight
        if module.gathers_input:
            dx = reduce_scatter_rows(dx, module.tp_group).wait()
        elif module.parallel_mode == "column" and module.tp_size > 1:
            dist.all_reduce(dx, group=module.tp_group)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            normed = module.norm(leaf)
        return torch.autograd.grad(normed, leaf, dx.view(x.shape))[0], None, None, None


class _TELinear(nn.Module):
    parallel_mode: str

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        skip_bias_add: bool,
        tp_group: dist.ProcessGroup | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp_group = self._tp_group = (
            tp_group or parallel_state.get_tensor_model_parallel_group()
        )
        self.tp_size = dist.get_world_size(self._tp_group)
        self.sequence_parallel = config.sequence_parallel and self.tp_size > 1
        self.te_return_bias = skip_bias_add and bias
        self.is_first_microbatch = True
        self.workspace: Tensor | None = None
        self.activation_dtype = config.params_dtype
        self._fp8_workspaces: dict[str, Any] = {}
        self.num_quantisations = 0
        if self.parallel_mode == "column":
            output_size //= self.tp_size
        else:
            input_size //= self.tp_size
        dtype = config.params_dtype
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=dtype))
        self.weight.partition_dim = 0 if self.parallel_mode == "column" else 1
        self.use_bias = bias
        self.bias = nn.Parameter(torch.zeros(output_size, dtype=dtype)) if bias else torch.Tensor()

    @property
    def fp8(self) -> bool:
        """True if the caller is inside FP8 autocast; here: if the configuration says FP8."""
        return bool(getattr(self.config, "fp8", None))

    @property
    def gathers_input(self) -> bool:
        return self.parallel_mode == "column" and self.sequence_parallel

    def norm(self, x: Tensor) -> Tensor:
        return x * 1

    def prepare_forward(self, x: Tensor) -> Tensor:
        """Begins an FP8 product that somebody else computes."""
        return x

    def end_forward(self) -> None:
        """Ends it."""

    def _get_quantizers(self, *_: bool) -> list[Quantizer]:
        return [Quantizer() for _ in range(6)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns two values always, like the wrappers."""
        weight: Tensor = self.weight
        if self.fp8:
            if self.is_first_microbatch or self.workspace is None:
                self.workspace = quantised(self.weight.detach())
                self.num_quantisations += 1
            weight = self.workspace
        bias = self.bias if self.use_bias and not self.te_return_bias else None
        out = _Linear.apply(x, weight, bias, self)
        self.is_first_microbatch = False
        return out, self.bias if self.te_return_bias else None


class TEColumnParallelLinear(_TELinear):
    """Output features are cut; under sequence parallelism the input is gathered."""

    parallel_mode = "column"


class TERowParallelLinear(_TELinear):
    """Input features are cut; the output is summed, or summed and scattered over rows."""

    parallel_mode = "row"


class TELayerNormColumnParallelLinear(_TELinear):
    """`TEColumnParallelLinear` behind a norm of the rows that this rank holds."""

    parallel_mode = "column"

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        config = self.config
        self.eps = config.layernorm_epsilon
        self.normalization = config.normalization
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        weight = torch.zeros if self.zero_centered_gamma else torch.ones
        self.layer_norm_weight = nn.Parameter(weight(input_size, dtype=config.params_dtype))
        self.layer_norm_bias = None
        if self.normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))

    def norm(self, x: Tensor) -> Tensor:
        """RMSNorm or LayerNorm of `[..., input_size]`, written out."""
        gamma = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        if self.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        scaled = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * gamma
        return scaled if self.layer_norm_bias is None else scaled + self.layer_norm_bias


class _GroupedLinear(nn.Module):
    """Transformer Engine's GEMM of several experts: a weight each, and numbers of rows.

    The output is a view made inside an autograd function, as there.
    """

    cut: int

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **_: Any
    ) -> None:
        super().__init__()
        shape = [output_size, input_size]
        shape[self.cut] //= parallel_state.get_expert_tensor_parallel_world_size()
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            weight.partition_dim = self.cut
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, None]:
        """Returns two values always, like the wrappers."""
        assert len(m_splits) == self.num_gemms
        assert sum(m_splits) == len(x)
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return _Grouped.apply(x, list(m_splits), *weights), None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        ctx.splits = splits
        parts = zip(x.split(splits), weights, strict=True)
        out = torch.cat([F.linear(part, weight) for part, weight in parts])
        return out.view(-1, *x.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        parts = zip(dy.split(ctx.splits), ctx.saved_tensors, strict=True)
        dx = torch.cat([part @ weight for part, weight in parts])
        return dx, None, *(None for _ in ctx.saved_tensors)


class TEColumnParallelGroupedLinear(_GroupedLinear):
    """Output features of every expert are cut by expert tensor parallelism."""

    cut = 0


class TERowParallelGroupedLinear(_GroupedLinear):
    """Input features of every expert are cut; nobody sums inside it."""

    cut = 1


class Engine:
    """Transformer Engine's functions as far as `layers.transformer_engine` calls them.

    Quantised values are the values; counts what is quantised.
    """

    def __init__(self, *, delayed: bool = False) -> None:
        self.weights_quantised = self.steps_ended = 0
        self.on = True
        self.recipe = SimpleNamespace(delayed=lambda: delayed)
        self.state = self
        self.general_gemm = _gemm
        self._is_first = True

    def is_fp8_enabled(self) -> bool:
        return self.on

    def get_fp8_recipe(self) -> Any:
        return self.recipe

    def get_autocast_state(self) -> bool:
        return self.on

    def set_autocast_state(self, on: bool) -> None:
        self.on = on

    def is_first_module(self) -> bool:
        is_first, self._is_first = self._is_first, False
        return is_first

    def reduce_and_update_fp8_tensors(self, *, forward: bool) -> None:
        assert not forward
        self.steps_ended += 1

    def quantize_weight(self, *, tensor: Tensor, workspace: Any, **given: Any) -> Any:
        if workspace is None or given["update_workspace"]:
            self.weights_quantised += 1
        if workspace is None:
            workspace = Quantised(tensor)
            return workspace, workspace
        workspace.values = tensor
        return workspace, None


class Quantised:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def update_usage(self, **_: bool) -> None:
        pass


class Quantizer:
    """A quantiser that asks other ranks for their maximum."""

    with_amax_reduction = True

    def copy(self) -> Quantizer:
        return Quantizer()

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        assert rowwise

    def __call__(self, x: Tensor) -> Quantised:
        assert not self.with_amax_reduction, "all ranks have the same rows"
        return Quantised(x)


def _gemm(
    weight: Quantised, x: Quantised, *, out: Tensor | None, accumulate: bool, layout: str, **_: Any
) -> tuple[Tensor]:
    product = x.values @ (weight.values if layout == "NN" else weight.values.t())
    assert accumulate == (out is not None)
    return (product if out is None else out.add_(product),)
