"""The frozen weights of norms, as the definition and every kernel take them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class NormWeight(NamedTuple):
    """The frozen weight of a norm, and how the norm rounds."""

    weight_H: torch.Tensor
    eps: float
    zero_centered: bool = False
    """The weight is held less 1; such a norm rounds once."""
    rounds_once: bool = True
    """Behind the weight, and not before it too."""


class HeadNorms(NamedTuple):
    """Norms of single heads of queries and keys, which are equal but for the weights `[D]`."""

    query: NormWeight
    key: NormWeight
