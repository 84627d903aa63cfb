"""The base of the FP8 oracle: a Hugging Face model whose linears quantise their rows.

PEFT wraps these linears as it wraps others and feeds its branch from the unquantised input. The
arithmetic is docs/fp8.md's, written anew: rounding by exponents instead of a type of 8 bits, and
products of dequantised values. Linears that are one in the package (q, k and v; gate and up) are
quantised as one here, because a row of their gradients shares a scale.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.helpers.fp8_folders import Dequantized, dequantized

LARGEST = 448.0
BLOCK = 128
_FLOAT32 = torch.float32
"""The type itself, in processes that widen floats, too."""
_FUSED = (
    ("self_attn", ("q_proj", "k_proj", "v_proj"), "column"),
    ("self_attn", ("o_proj",), "row"),
    ("mlp", ("gate_proj", "up_proj"), "column"),
    ("mlp", ("down_proj",), "row"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeQuant:
    tp_size: int = 1
    """Ranks that would cut the linears, each of which has scales of its own."""
    unquantised: tuple[str, ...] = ()
    """Linears of all layers (`down_proj`), of one, or layers (`layers.0`) that stay as they are."""
    blocks_of: str | None = None
    """Folder published in blocks of 128 x 128, which divide all linears, that gives the weights;
    None = they are rounded by output channels."""

    def apply(self, model: nn.Module) -> None:
        """Puts quantising linears in the place of those of all layers, before PEFT comes."""
        published = {} if self.blocks_of is None else dequantized(Path(self.blocks_of))
        for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr]
            for parent, names, kind in _FUSED:
                if self._leaves(f"layers.{index}", names):
                    continue
                module, weights = getattr(layer, parent), []
                for name in names:
                    linear = getattr(module, name)
                    held = published.get(f"model.layers.{index}.{parent}.{name}.weight")
                    weights.append(by_channels(linear) if held is None else in_blocks(held, linear))
                fused = _Fused(weights, kind, self)
                for place, name in enumerate(names):
                    setattr(module, name, FakeQuantLinear(getattr(module, name), fused, place))

    def _leaves(self, layer: str, names: Sequence[str]) -> bool:
        within = {f"{layer}.{name}" for name in names}
        return not within.union(names, [layer]).isdisjoint(self.unquantised)


def round_to_e4m3(values: Tensor) -> Tensor:
    """Rounds values of up to 448 to 4 bits of exponent and 3 of mantissa; ties to even."""
    values = values.to(_FLOAT32)  # before, whatever comes in: most ties are ties of fp32
    _, exponent = torch.frexp(values)
    step = torch.exp2((exponent - 1).clamp(min=-6).to(values.dtype) - 3)
    return torch.round(values / step) * step


class Rounded(NamedTuple):
    """Rounded values, in the dtype of those before, and the fp32 scale that they must be given."""

    values: Tensor
    scales: Tensor

    def read(self) -> Tensor:
        return self.values * self.scales.to(self.values.dtype)


def round_over(values: Tensor, dims: Sequence[int], dtype: torch.dtype) -> Rounded:
    """Rounds values in fp32, with a scale over some dimensions."""
    values = values.float()
    amax = values.abs().amax(dim=tuple(dims), keepdim=True)
    scales = torch.clamp(amax / LARGEST, min=2.0**-100)
    rounded = round_to_e4m3((values * (1 / scales)).clamp(-LARGEST, LARGEST))
    return Rounded(rounded.to(dtype), scales)


class FakeQuantLinear(nn.Linear):
    """A linear that holds dequantised values; its product is a part of a fused one."""

    def __init__(self, linear: nn.Linear, fused: _Fused, index: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(fused.weights[index].dequantised_NK, requires_grad=False)
        self.bias = linear.bias
        self._fused, self._index = (fused,), index  # in a tuple: a module would be registered

    def forward(self, x: Tensor) -> Tensor:
        y = self._fused[0].product(x, self._index)
        # PEFT may add in place, which one of several results does not allow.
        return y.clone() if self.bias is None else y + self.bias


class Weight(NamedTuple):
    dequantised_NK: Tensor
    fold_N: Tensor
    """Factors of gradients before they are rounded."""
    for_dgrad_NK: Tensor


def by_channels(linear: nn.Linear) -> Weight:
    rounded = round_over(linear.weight.detach(), (1,), linear.weight.dtype)
    return Weight(rounded.read(), rounded.scales[:, 0], rounded.values)


def in_blocks(published: Dequantized, like: nn.Linear) -> Weight:
    weight_NK = published.values.to(like.weight.dtype) * published.scales.to(like.weight.dtype)
    return Weight(weight_NK, torch.ones(len(weight_NK)), weight_NK)


class _Fused:
    """Linears of one input; the first that is called computes all."""

    def __init__(self, weights: Sequence[Weight], kind: str, how: FakeQuant) -> None:
        self.weights = weights
        self.group = None if how.blocks_of is None else BLOCK
        self.in_parts = how.tp_size if kind == "row" else 1
        self.out_parts = how.tp_size if kind == "column" else 1
        self._given: Tensor | None = None
        self._results: list[Tensor] = []

    def product(self, x: Tensor, index: int) -> Tensor:
        if index == 0:
            self._given, self._results = x, list(_Product.apply(x, self))
        assert self._given is x, "fused linears must be given one input, in turn"
        result = self._results[index]
        if index == len(self.weights) - 1:
            self._given, self._results = None, []
        return result

    def forward(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        """Returns all products; each rank's part of a row is rounded by itself."""
        size = self.group or x_TK.shape[1] // self.in_parts
        parts = round_over(x_TK.view(len(x_TK), -1, size), (2,), x_TK.dtype)
        read_TK = parts.read().view_as(x_TK)
        return tuple(read_TK @ w.dequantised_NK.t() for w in self.weights)

    def backward(self, dys: Sequence[Tensor]) -> Tensor:
        """Returns dx; on each rank, a row of the gradients of all its linears has one scale."""
        dtype = dys[0].dtype
        folded = [dy.float() * w.fold_N for dy, w in zip(dys, self.weights, strict=True)]
        cut = zip(
            zip(*(dy.chunk(self.out_parts, dim=1) for dy in folded), strict=True),
            zip(*(w.for_dgrad_NK.chunk(self.out_parts) for w in self.weights), strict=True),
            strict=True,
        )
        products = [
            round_over(torch.cat(dy, dim=1), (1,), dtype).read() @ torch.cat(weights)
            for dy, weights in cut
        ]
        return torch.stack(products).sum(dim=0)


class _Product(torch.autograd.Function):
    """The products of fused linears with rounded rows; straight through the rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fused: _Fused) -> tuple[Tensor, ...]:
        ctx.fused, ctx.x_shape = fused, x.shape
        results = fused.forward(x.flatten(0, -2))
        return tuple(y.view(*x.shape[:-1], -1) for y in results)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None]:
        dx = ctx.fused.backward([dy.flatten(0, -2) for dy in dys])
        return dx.view(ctx.x_shape), None
