"""Whole canonical tensors, put together from the flat buffers of ranks that hold their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tlora_megatron.layers.slab.factors import factor_shape
from tlora_megatron.layers.slab.layout import Factor, SlabLayout
from tlora_megatron.model.backbone import Backbone


class WholeTensor(NamedTuple):
    """A whole canonical tensor, whose parts lie in flat CPU buffers of the model-parallel ranks."""

    name: str
    shape: tuple[int, ...]
    parts: list[tuple[Factor, torch.Tensor]]

    def join(self, room: torch.Tensor) -> torch.Tensor:
        """Puts the parts together in `room` and returns it."""
        for factor, part in self.parts:
            factor.place(room, part)
        return room

    def of_expert(self, expert: int) -> WholeTensor:
        """Returns one expert's matrix of a tensor of routed experts."""
        parts = [
            (factor._replace(shape=factor.shape[1:], experts=None), part[expert - held.start])
            for factor, part in self.parts
            if (held := factor.experts) is not None and expert in held
        ]
        return WholeTensor(f"{self.name} of expert {expert}", self.shape[1:], parts)

    def as_stored(self) -> torch.Tensor | None:
        """Returns the tensor where it lies if one part is all of it; None if it must be joined."""
        factor, part = self.parts[0]
        whole = factor.is_whole_as_stored and tuple(part.shape) == self.shape
        return part if whole else None


def find_whole_tensors(
    layouts: Sequence[SlabLayout], buffers: Sequence[torch.Tensor], spec: Backbone
) -> list[WholeTensor]:
    """Finds every whole canonical tensor in the flat CPU buffers of all model-parallel ranks."""
    parts: dict[str, list[tuple[Factor, torch.Tensor]]] = {}
    for layout, buffer in zip(layouts, buffers, strict=True):
        for factor, view in zip(layout.factors, layout.views(buffer), strict=True):
            parts.setdefault(factor.name, []).append((factor, view))
    lora = layouts[0].lora
    return [
        WholeTensor(name, factor_shape(spec, name, lora), found) for name, found in parts.items()
    ]


def whole_tensors(
    layouts: Sequence[SlabLayout], buffers: Sequence[torch.Tensor], spec: Backbone
) -> dict[str, torch.Tensor]:
    """Joins the flat buffers of all model-parallel ranks into whole canonical CPU tensors."""
    found = find_whole_tensors(layouts, [buffer.cpu() for buffer in buffers], spec)
    return {tensor.name: tensor.join(torch.empty(tensor.shape)) for tensor in found}


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses weights or moments that training could not continue from.

    Raises:
        ValueError: naming the first tensor that holds NaN or inf.
    """
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise ValueError(f"{name} must be finite, got NaN or inf")


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
        return bool(np.isfinite(tensor.detach().numpy()).all())  # 20 GB/s, where torch has 0.6
    return bool(tensor.isfinite().all())
