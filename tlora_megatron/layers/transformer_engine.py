"""Adapters on Transformer Engine's linears, whose product is computed here, in FP8 by its GEMMs.

The module keeps weight, names and checkpoints, and its `forward` stays Transformer Engine's, with
the adapters around it. `product_vjp` computes the product alone from the weight: the norm that a
`TELayerNormColumnParallelLinear` begins with is its caller's.

In FP8 a linear keeps its quantisers, its recipe's state and its quantised weight. Called apart its
GEMMs leave out what a frozen base under adapters has no use for: transposes for a weight's
gradient, and passes that add the adapters' part, which the GEMM adds itself. A weight is quantised
once; under delayed scaling in every step, whose scales move.

Most of these names are Transformer Engine's own business. So `why_not_fp8` first runs a small
linear both ways: where a name is missing, or a bit differs, linears compute by themselves.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.linear import LinearLayout
from tlora_megatron.layers.multi_adapter import (
    BlackBoxMixin,
    LinearAdapters,
    product_adapters,
    product_vjp,
)
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.frozen.parts import Vjp
from tlora_megatron.ops.lora.linear_ops import Base
from tlora_megatron.ops.quantised.rows import ONE_SCALE, UNIT, Largest, OneScale, take_largest
from tlora_megatron.ops.routing import MicroBatchView
from tlora_megatron.parallel.lanes import Lane

_PACKAGE = __name__.partition(".")[0]
_BASES = {
    "TELayerNormColumnParallelLinear": "column",
    "TEColumnParallelLinear": "column",
    "TERowParallelLinear": "row",
}
"""Megatron's wrappers, by name: Transformer Engine may not be installed. Their `parallel_mode`."""


class TEProductMixin(BlackBoxMixin):
    """Adds the product without autograd to what `BlackBoxMixin` does.

    Inside an autocast to FP8 the base's GEMMs are Transformer Engine's (`Fp8Base`),
    otherwise ours. Relies on what `why_not_te_product` has seen: weights of the activations' dtype,
    and no communication inside the GEMMs.
    """

    config: Any
    """Megatron's `TransformerConfig`."""
    tlora_product: LinearAdapters
    """The adapters where the GEMM is ours; `tlora_adapters` has them where it is not."""

    def adapter_layout(self, site: Site) -> LinearLayout:
        layout = super().adapter_layout(site)
        is_whole = site.kind == "column" and layout.tp_size > 1 and not layout.sequence_parallel
        return replace(layout, reduces_dgrad=is_whole)

    def bind_adapters(self, bank: AdapterBank, site: Site) -> None:
        super().bind_adapters(bank, site)
        adapters = product_adapters(bank, site, self.adapter_layout(site))
        object.__setattr__(self, "tlora_product", adapters)

    def product_vjp(self, x: Tensor, view: MicroBatchView, lane: Lane | None) -> tuple[Tensor, Vjp]:
        """Returns the product of `[T, K]` behind the norm, in two dimensions, and the way back."""
        linear: Any = self
        return product_vjp(te_base(linear), _bias(linear), self.tlora_product, x, view, lane)


def one_scale(linear: Any) -> OneScale | None:
    """Returns `ONE_SCALE` if the linear now quantises all its rows, which no other rank shares,
    with one scale."""
    if not (isinstance(linear, TEProductMixin) and linear.config.fp8 and computes_fp8()):
        return None
    is_alone = linear.config.fp8_recipe == "tensorwise" and not linear.config.sequence_parallel
    return ONE_SCALE if is_alone else None


def is_te_linear(linear: Any) -> bool:
    """True for Megatron's wrappers of Transformer Engine's parallel linears."""
    return _wrapper(linear) is not None


def why_not_te_product(linear: Any) -> str | None:
    """Returns why a linear of Transformer Engine must compute by itself; None if it need not."""
    name = _wrapper(linear)
    if name is None:
        return f"a {type(linear).__name__} is a linear of another kind"
    if linear.parallel_mode != _BASES[name]:
        return f"a {name} has parallel_mode {linear.parallel_mode}"
    if getattr(linear, "te_quant_params", None) is not None:
        return "a linear has quantisation settings of its own"
    in_fp8 = getattr(linear, "primary_weights_in_fp8", False) and linear.config.fp8
    if not (is_plain(linear.weight) or in_fp8):
        return f"weights are held as {type(linear.weight).__name__}"
    if linear.parallel_mode == "row" and _bias(linear) is not None:
        return "a row-parallel linear has a bias"
    if linear.te_return_bias:
        return "a bias is left to the caller"
    return None


def _wrapper(linear: Any) -> str | None:
    """The wrapper that a linear is, with or without adapters; None for classes made from one."""
    names = [c.__name__ for c in type(linear).__mro__ if c.__module__.split(".")[0] != _PACKAGE]
    return names[0] if names[0] in _BASES else None


def _bias(linear: Any) -> Tensor | None:
    """Returns the bias; Transformer Engine has a tensor of length zero where there is none."""
    bias = linear.bias
    return None if bias is None or not bias.numel() else bias


_CLASSES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
}
"""Transformer Engine's recipe for each value of Megatron's `fp8_recipe` that is computed here."""
RECIPES = tuple(_CLASSES)
_DTYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
_PROBE = (256, 384, 512)
"""Rows, features in and out of the linear that is run both ways."""
_VERSION = "tlora_quantised_version"
"""On a linear: which values of its weight Transformer Engine has quantised."""


class _TransformerEngine(NamedTuple):
    """Names that are used of Transformer Engine."""

    state: Any
    """`FP8GlobalStateManager`."""
    general_gemm: Callable[..., Any]
    quantize_weight: Callable[..., Any]
    is_first_module: Callable[[], bool]
    """True for the first linear of a forward pass, whose backward pass ends the step's."""


@functools.cache
def _engine() -> _TransformerEngine:
    """Imports what is used.

    Raises:
        ImportError, AttributeError: if Transformer Engine is missing, or another one.
    """
    module = importlib.import_module
    linear = module("transformer_engine.pytorch.module.linear")
    return _TransformerEngine(
        state=module("transformer_engine.pytorch.quantization").FP8GlobalStateManager,
        general_gemm=module("transformer_engine.pytorch.cpp_extensions").general_gemm,
        quantize_weight=module("transformer_engine.pytorch.module.base").quantize_weight,
        is_first_module=linear._check_fp8_reduce_and_update,
    )


def computes_fp8() -> bool:
    """Returns True inside Transformer Engine's autocast to FP8."""
    return bool(_engine().state.is_fp8_enabled())


def replay_autocast() -> Callable[[], AbstractContextManager[None]]:
    """Returns what enters the present autocast again, for a forward that backward repeats.

    Not for delayed scaling, whose scales may have moved since.
    """
    state = _engine().state
    inside = state.get_autocast_state()

    @contextmanager
    def enter() -> Iterator[None]:
        outside = state.get_autocast_state()
        state.set_autocast_state(inside)
        try:
            yield
        finally:
            state.set_autocast_state(outside)

    return enter


def te_base(linear: Any) -> Base:
    """Returns the base of a linear as it is to be computed now: in FP8 inside an autocast to it."""
    if linear.config.fp8 and computes_fp8():
        return Fp8Base(linear)
    weight = linear.weight
    return weight if is_plain(weight) else weight.dequantize()


def is_plain(weight: Tensor) -> bool:
    """True unless a weight is held in FP8."""
    return type(weight) in (torch.nn.Parameter, Tensor)


class Fp8Base:
    """The FP8 products of one linear, of one forward and its backward; a `FrozenBase`.

    Args:
        linear: one of Megatron's wrappers of Transformer Engine's linears. Rows that other ranks
            hold have been gathered, and what it returns is reduced, by the caller.
    """

    def __init__(self, linear: Any) -> None:
        self._linear = linear
        self.num_columns = len(linear.weight)
        self._weight: Any = None
        self._quantizer: Any = None
        self._recipe: Any = None
        self._ends_step = False

    def forward(self, x_TK: Tensor, onto_TN: Tensor | None) -> Tensor:
        """Returns `x W^T` `[T, N]`; added to `onto_TN`, in place, where there is one."""
        linear, engine = self._linear, _engine()
        largest = take_largest(x_TK)
        x_TK = linear.prepare_forward(x_TK)
        try:
            # Its parts are input, weight, output, grad_input, grad_weight, grad_output.
            quantizers = linear._get_quantizers(False, False, True)
            self._recipe = engine.state.get_fp8_recipe()
            self._weight = _quantized_weight(linear, quantizers[1], self._recipe)
            self._quantizer = _alone(quantizers[5])
            self._ends_step = engine.is_first_module() and self._recipe.delayed()
            y_TN = _gemm(
                self._weight,
                _rows(_alone(quantizers[0]), x_TK, largest),
                onto_TN,
                x_TK.dtype,
                splits=_splits(self._recipe, "fp8_gemm_fprop", False),
            )
        finally:
            linear.end_forward()
        return y_TN

    def dgrad(self, dy_TN: Tensor, onto_TK: Tensor | None) -> Tensor:
        """Returns `dy W` `[T, K]`; added to `onto_TK`, in place, where there is one."""
        self._weight.update_usage(columnwise_usage=True)
        largest = take_largest(dy_TN)
        dx_TK = _gemm(
            self._weight,
            _rows(self._quantizer, dy_TN.contiguous(), largest),
            onto_TK,
            dy_TN.dtype,
            layout="NN",
            grad=True,
            splits=_splits(self._recipe, "fp8_gemm_dgrad", True),
        )
        if self._ends_step:
            _engine().state.reduce_and_update_fp8_tensors(forward=False)
        return dx_TK


def _quantized_weight(linear: Any, quantizer: Any, recipe: Any) -> Any:
    """Returns the weight in FP8, by rows and by columns; the linear's cache has it from then on."""
    weight, cache = linear.weight, linear._fp8_workspaces
    if not is_plain(weight):
        quantizer = weight._quantizer
    quantizer.set_usage(rowwise=True, columnwise=True)
    version = (weight.data_ptr(), weight._version)
    moves = recipe.delayed() and linear.is_first_microbatch is not False
    quantized, created = _engine().quantize_weight(
        tensor=weight,
        quantizer=quantizer,
        workspace=cache.get("weight"),
        update_workspace=moves or linear.__dict__.get(_VERSION) != version,
        workspace_dtype=linear.activation_dtype,
        cache=True,
    )
    if created is not None:
        cache["weight"] = created
    object.__setattr__(linear, _VERSION, version)
    linear.is_first_microbatch = False
    quantized.update_usage(rowwise_usage=True)
    return quantized


def _alone(quantizer: Any) -> Any:
    """Returns a quantiser that asks no other rank: all have the same rows."""
    if getattr(quantizer, "with_amax_reduction", False):
        quantizer = quantizer.copy()
        quantizer.with_amax_reduction = False
    return quantizer


def _rows(quantizer: Any, x_TK: Tensor, largest: Largest | None = None) -> Any:
    """Returns rows in FP8; a current scale is made of the largest magnitude where that is known."""
    quantizer.set_usage(rowwise=True, columnwise=False)
    dtype = None if largest is None else _plain_scaling(quantizer)
    if largest is None or dtype is None or x_TK.numel() % UNIT:
        return quantizer(x_TK)
    # Not at the top: triton is only there on machines with a GPU.
    from tlora_megatron.ops.quantised.triton_tensor_scale import launch_cast

    codes = torch.empty_like(x_TK, dtype=torch.uint8)
    rows = quantizer.create_tensor_from_data(codes, fake_dtype=x_TK.dtype, internal=True)
    launch_cast(x_TK, largest, codes, rows._scale_inv, dtype)
    return rows


def _plain_scaling(quantizer: Any) -> torch.dtype | None:
    """Returns the dtype of a quantiser by current scaling; None where it scales in another way."""
    if type(quantizer).__name__ != "Float8CurrentScalingQuantizer":
        return None
    if quantizer.force_pow_2_scales or quantizer.amax_epsilon or quantizer.with_amax_reduction:
        return None
    return _DTYPES.get(getattr(quantizer.dtype, "name", ""))


def _splits(recipe: Any, product: str, default: bool) -> bool:
    """True if a product's GEMM adds partial sums in fp32; `default` where the recipe is silent."""
    parameters = getattr(recipe, product, None)
    return default if parameters is None else parameters.use_split_accumulator


def _gemm(
    weight: Any,
    rows: Any,
    onto: Tensor | None,
    dtype: torch.dtype,
    *,
    splits: bool,
    layout: str = "TN",
    grad: bool = False,
) -> Tensor:
    return _engine().general_gemm(
        weight,
        rows,
        out_dtype=dtype,
        out=onto,
        accumulate=onto is not None,
        layout=layout,
        grad=grad,
        use_split_accumulator=splits,
    )[0]


def why_not_fp8(recipe: str) -> str | None:
    """Returns why Transformer Engine's FP8 linears must compute by themselves here, or None.

    Args:
        recipe: Megatron's name of it.
    """
    if recipe not in RECIPES:
        return f"fp8_recipe is {recipe}: only {', '.join(RECIPES)} are computed around its GEMMs"
    try:
        return _probe(recipe)
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError, AssertionError) as e:
        return f"this Transformer Engine is another than its FP8 was written for: {e}"


@functools.cache
def _probe(recipe: str) -> str | None:
    """Runs a small linear by itself and by `Fp8Base`; returns what differs."""
    te: Any = importlib.import_module("transformer_engine.pytorch")
    formats: Any = importlib.import_module("transformer_engine.common.recipe")
    made = getattr(formats, _CLASSES[recipe])()
    if getattr(made, "backward_override", None) is not None:
        return f"NVTE_BACKWARD_OVERRIDE is {made.backward_override}"
    rows, size_in, size_out = _PROBE
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        linears = [
            te.Linear(size_in, size_out, bias=False, params_dtype=torch.bfloat16) for _ in range(2)
        ]
        x, dy = (
            torch.randn(rows, size, dtype=torch.bfloat16, device="cuda")
            for size in (size_in, size_out)
        )
    theirs, ours = linears
    for linear in linears:
        linear.weight.requires_grad_(False).copy_(theirs.weight)
        linear.is_first_microbatch = True  # as on Megatron's wrappers
    leaf, base = x.clone().requires_grad_(), Fp8Base(ours)
    # One context each: delayed scales move behind it.
    with te.autocast(enabled=True, recipe=made):
        y = theirs(leaf, is_first_microbatch=None)
    with torch.no_grad(), te.autocast(enabled=True, recipe=made):
        our_y = base.forward(x, None)
    y.backward(dy)
    with torch.no_grad():
        our_dx = base.dgrad(dy, None)
    assert leaf.grad is not None, "Transformer Engine's linear goes back to its input"
    if torch.equal(our_y, y) and torch.equal(our_dx, leaf.grad):
        return None
    return "this Transformer Engine's FP8 gives other bits around its GEMMs"
