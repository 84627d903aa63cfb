"""One adapter's factors on a rank: where they lie, their memory, and the tensors that they make."""

from tlora_megatron.layers.slab.adapter_slab import AdapterSlab, Copier, Fill, StatePlacement
from tlora_megatron.layers.slab.factors import (
    WholeTensor,
    check_finite,
    factor_names,
    factor_shape,
    find_whole_tensors,
    initial_factor,
    initial_factors,
    split_name,
    whole_tensors,
)

__all__ = [
    "AdapterSlab",
    "Copier",
    "Fill",
    "StatePlacement",
    "WholeTensor",
    "check_finite",
    "factor_names",
    "factor_shape",
    "find_whole_tensors",
    "initial_factor",
    "initial_factors",
    "split_name",
    "whole_tensors",
]
