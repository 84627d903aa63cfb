"""A rank's weights out of a Hugging Face folder, and a GPTModel whose linears hold FP8 codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tlora_megatron.layers.quantised_linear import quantise_in_place
from tlora_megatron.model.quantisation import PARTS, BaseQuantisation
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.base_reader import read_base
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, weight_source
from tlora_megatron.training.formats.hf_convert import Rounding, check_weights, draw_base
from tlora_megatron.training.formats.quantised import QuantizedSource
from tlora_megatron.training.formats.rank_tensors import RankTensor


def read_weights(
    directory: Path,
    spec: ModelSpec,
    quantisation: BaseQuantisation | None,
    tensors: Sequence[RankTensor],
    parameters: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
) -> Rounding:
    """Fills a rank's parameters from a Hugging Face folder, whatever form its weights have.

    Args:
        quantisation: the one that the model was built with.
        tensors: where in the folder each parameter's rows are.
        scales: those of the parameters that hold codes, by the same names.

    Returns:
        How far the codes of quantised linears are from their weights.

    Raises:
        ValueError: if the folder's weights are missing, corrupt, not finite, or of another
            architecture.
    """
    if quantisation is None or quantisation.published is None:
        checkpoint = HFCheckpoint(directory)
        if spec.gpt_oss is not None:
            return _read_gpt_oss(checkpoint, spec, tensors, parameters)
        check_weights(spec, checkpoint)
        return read_base(checkpoint, tensors, parameters, scales)
    source = QuantizedSource(directory, quantisation.published)
    check_weights(spec, source)
    source.check(spec, quantisation)
    rounding = read_base(source, tensors, parameters, scales)
    for tensor in tensors:
        if tensor.name in scales:
            source.put_scales(tensor, scales[tensor.name])
    return rounding


def _read_gpt_oss(
    checkpoint: HFCheckpoint,
    spec: ModelSpec,
    tensors: Sequence[RankTensor],
    parameters: Mapping[str, Tensor],
) -> Rounding:
    """Reads a base whose files hold all experts of a layer in one tensor, maybe in MXFP4."""
    device = next(iter(parameters.values())).device
    source = weight_source(spec, checkpoint, device)
    check_weights(spec, source)
    stored = set(checkpoint.keys())
    of_experts = [t for t in tensors if t.pieces[0].source not in stored]
    names = {tensor.name for tensor in of_experts}
    draw_base(source, of_experts, parameters, {})
    return read_base(checkpoint, [t for t in tensors if t.name not in names], parameters)


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
                made = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
                made.__dict__.update(parameter.__dict__)
                module._parameters[name] = made
