"""A model that someone else built: its parts whatever wraps them, and what freezing takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def language_models(chunks: Sequence[nn.Module]) -> list[Any]:
    """The GPTModel or HybridModel inside each chunk: out of DDP, Float16Module and the like.

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
    grad, and the adapters get none. Call it before the model is wrapped by DDP.
    """
    for model in language_models(chunks):
        model.requires_grad_(False)
        if hasattr(model, "embedding"):
            model.embedding.register_forward_hook(_require_grad)


def _require_grad(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_(torch.is_grad_enabled())
