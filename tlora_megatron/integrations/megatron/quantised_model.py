"""A GPTModel whose linears hold FP8 codes: built without memory for the weights they replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tlora_megatron.layers.quantised_linear import quantise_in_place, quantised_linears
from tlora_megatron.model.quantisation import PARTS, BaseQuantisation


class OnMeta(TorchFunctionMode):
    """Gives memory to nothing that `torch.empty` makes: Megatron's parameters name a device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def hold_codes(
    model: Any, quantisation: BaseQuantisation, first_layer: int, device: torch.device
) -> None:
    """Gives a model that was built `OnMeta` its memory: codes, scales, and what is left as it is.

    Args:
        first_layer: global index of this stage's first layer.
    """
    for local, layer in enumerate(model.decoder.layers):
        modules = {name.rsplit(".", 1)[-1]: module for name, module in layer.named_modules()}
        for linear in PARTS:
            if (first_layer + local, linear) in quantisation.linears:
                quantise_in_place(modules[linear], quantisation.kind, device)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                _allocate(module, name, parameter, device)


def _allocate(module: nn.Module, name: str, parameter: nn.Parameter, device: torch.device) -> None:
    made = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
    made.__dict__.update(parameter.__dict__)
    module._parameters[name] = made


def scales_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the scales of every quantised weight by the weight's name."""
    return {f"{name}.weight": held.scales for name, held in quantised_linears(model)}
