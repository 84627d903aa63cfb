"""Finds and freezes the parts of a model that someone else built, whatever wraps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tlora_megatron.training.formats.hf_checkpoint import all_finite

_BULK_OVERLAPS = ("ub_bulk_wgrad", "ub_bulk_dgrad")
"""Attributes of Transformer Engine's linears."""


def language_models(chunks: Sequence[nn.Module]) -> list[Any]:
    """Returns the GPTModel or HybridModel inside each chunk, out of DDP, Float16Module and so on.

    Raises:
        ValueError: if a chunk holds no model with a `decoder` of layers.
    """
    return [_language_model(chunk) for chunk in chunks]


def _language_model(chunk: nn.Module) -> Any:
    model: Any = chunk
    while not hasattr(model, "decoder") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    if not isinstance(getattr(getattr(model, "decoder", None), "layers", None), nn.ModuleList):
        raise ValueError(
            f"the model must be a GPTModel or HybridModel with a decoder of layers, got "
            f"{type(model).__name__}"
        )
    return model


def freeze(chunks: Sequence[nn.Module]) -> None:
    """Freezes every parameter and makes the embedding's output require grad.

    Without the latter a re-entrant checkpoint, and the first linear, see no input that requires
    grad, and the adapters get no gradient. Call it before the model is wrapped by DDP.

    Transformer Engine's bulk overlaps (`--tp-comm-overlap`) are turned off. They leave the sum of
    an input's gradient over the ranks to the GEMM of the weight's gradient, which a frozen weight
    does not run (2.17): ranks would go on with parts of it.
    """
    for model in language_models(chunks):
        model.requires_grad_(False)
        for module in model.modules():
            for name in _BULK_OVERLAPS:
                if getattr(module, name, False):
                    setattr(module, name, False)
        if hasattr(model, "embedding"):
            model.embedding.register_forward_hook(_require_grad)


def require_whole_weights(chunks: Sequence[nn.Module]) -> None:
    """Makes loading a state dict that does not fit, or is not finite, raise ValueError.

    Megatron's loader answers `strict` by loading once more without it, for states of Transformer
    Engine that come and go (those are ignored here too), and would train over random weights.
    """
    for model in language_models(chunks):
        model.register_load_state_dict_post_hook(_check_loaded)


def _check_loaded(module: nn.Module, keys: Any) -> None:
    missing, unexpected = (
        [key for key in names if not key.endswith("_extra_state")]
        for names in (keys.missing_keys, keys.unexpected_keys)
    )
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint must hold the weights of this model and no others, got "
            f"{len(missing)} missing ({', '.join(missing[:3])}) and {len(unexpected)} unexpected "
            f"({', '.join(unexpected[:3])})"
        )
    for name, parameter in module.named_parameters():
        values = parameter.data
        # Transformer Engine's FP8 weights are tensors of another kind, without this function.
        if type(values) is Tensor and values.numel() and not all_finite(values):
            raise ValueError(
                f"{name} of the checkpoint must be finite, got NaN or infinity: the base is "
                "damaged; convert it anew"
            )


def _require_grad(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_(torch.is_grad_enabled())
