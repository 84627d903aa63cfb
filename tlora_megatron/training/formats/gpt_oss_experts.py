"""The experts of gpt-oss's files, one linear of one expert at a time.

A stored layer holds all experts in one tensor: `gate_up_proj` `[E, H, 2 I]`, features in before
features out, gate and up taking turns among the latter, and `down_proj` `[E, I, H]`. Or it holds
them in MXFP4: `*_blocks` `[E, out, in / 32, 16]` with two 4-bit floats a byte, the first in the low
bits, and `*_scales` `[E, out, in / 32]`, an exponent of two, plus 127, for each 32 of them.
Here they have the names that other bases' files give them: `experts.7.gate_proj.weight` `[I, H]`.

Shapes: E experts, H hidden features, I features inside an expert.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, Rows, WeightSource

_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the 4-bit floats without a sign bit, which comes first."""
_IN_BLOCK = 32
_ZERO_EXPONENT, _NAN_SCALE = 127, 255


class _Place(NamedTuple):
    """A part of a tensor of all experts."""

    stored: str
    """Its name, without MXFP4's endings."""
    number: int
    turns: slice
    """Of the features out: gate and up take turns."""
    is_bias: bool


class GptOssExperts:
    """A `WeightSource` of a gpt-oss base: what is not an expert's is read as it is stored.

    The last tensor of an expert that was read stays in memory: gate and up lie in one.

    Args:
        checkpoint: the files.
        device: where experts are decoded and returned.
    """

    def __init__(self, checkpoint: HFCheckpoint, device: torch.device) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._names = set(checkpoint.keys())
        self._last: tuple[tuple[str, int], Tensor] | None = None

    def keys(self) -> list[str]:
        """Names of all stored tensors."""
        return self._checkpoint.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor.

        Raises:
            ValueError: if there is no tensor of that name.
        """
        place = _place(name)
        if place is None:
            return self._checkpoint.shape(name)
        experts, *shape = self._shape_of_all(place.stored, is_bias=place.is_bias)
        if place.number >= experts:
            raise ValueError(f"{place.stored} must hold expert {place.number}, got {experts}")
        return len(range(shape[0])[place.turns]), *shape[1:]

    def read(self, name: str, rows: Rows = None, cols: slice | None = None) -> Tensor:
        """Part of a tensor; see `WeightSource.read`. MXFP4 is decoded, exactly, to fp32.

        Raises:
            ValueError: if there is no tensor of that name, or it holds NaN or infinity.
        """
        place = _place(name)
        if place is None:
            return self._checkpoint.read(name, rows, cols)
        part = self._expert(place)[place.turns]
        runs = rows if isinstance(rows, list) else [rows or slice(None)]
        picked = torch.cat([part[run] for run in runs])
        return picked if cols is None else picked[:, cols]

    def check_counts(self, num_layers: int, num_experts: int) -> None:
        """Holds every layer's tensors to the number of experts.

        Raises:
            ValueError: naming the first tensor that has another one.
        """
        for layer in range(num_layers):
            for part in ("gate_up_proj", "down_proj"):
                name = f"model.layers.{layer}.mlp.experts.{part}"
                for is_bias in (False, True):
                    stored = f"{name}_bias" if is_bias else name
                    found = self._shape_of_all(stored, is_bias=is_bias)[0]
                    if found != num_experts:
                        raise ValueError(f"{stored} must hold {num_experts} experts, got {found}")

    def _shape_of_all(self, stored: str, *, is_bias: bool) -> tuple[int, ...]:
        """`[E, out, in]` of a weight, `[E, out]` of a bias."""
        if is_bias:
            return self._checkpoint.shape(stored)
        blocks, scales = f"{stored}_blocks", f"{stored}_scales"
        if blocks not in self._names:
            shape = self._checkpoint.shape(stored)
            if len(shape) != 3:
                raise ValueError(f"{stored} must have 3 dimensions, got shape {list(shape)}")
            return shape[0], shape[2], shape[1]
        shape, of_scales = self._checkpoint.shape(blocks), self._checkpoint.shape(scales)
        if len(shape) != 4 or shape[3] * 2 != _IN_BLOCK or of_scales != shape[:3]:
            raise ValueError(
                f"{blocks} must have shape [experts, out, in / {_IN_BLOCK}, {_IN_BLOCK // 2}], and "
                f"{scales} all but the last of it, got {list(shape)} and {list(of_scales)}"
            )
        for name in (blocks, scales):
            if self._checkpoint.dtype(name) != "U8":
                raise ValueError(f"{name} must be U8, got {self._checkpoint.dtype(name)}")
        return shape[0], shape[1], shape[2] * _IN_BLOCK

    def _expert(self, place: _Place) -> Tensor:
        """One expert's part of a tensor, features out first."""
        key = (place.stored, place.number)
        if self._last is None or self._last[0] != key:
            self._last = key, self._read_expert(place)
        return self._last[1]

    def _read_expert(self, place: _Place) -> Tensor:
        stored, row = place.stored, slice(place.number, place.number + 1)
        if f"{stored}_blocks" not in self._names or place.is_bias:
            whole = self._checkpoint.read(stored, row)[0].to(self._device)
            return whole if place.is_bias else whole.T
        blocks, scales = (
            self._checkpoint.read_bytes(f"{stored}_{part}", row)[0].to(self._device)
            for part in ("blocks", "scales")
        )
        if (scales == _NAN_SCALE).any():
            raise self._checkpoint.not_finite(f"{stored}_scales")
        return decode_mxfp4(blocks, scales)


def weight_source(spec: ModelSpec, checkpoint: HFCheckpoint, device: torch.device) -> WeightSource:
    """Returns a base's weights under the names of `hf_shapes`.

    Raises:
        ValueError: if a gpt-oss file has another number of experts.
    """
    if spec.gpt_oss is None or spec.experts is None:
        return checkpoint
    source = GptOssExperts(checkpoint, device)
    source.check_counts(spec.num_layers, spec.experts.num_experts)
    return source


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the values of MXFP4 codes in fp32, `[..., in]`, each of them exact.

    Args:
        blocks: uint8 `[..., in / 32, 16]`.
        scales: uint8 `[..., in / 32]`.
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()
    exponents = scales.int() - _ZERO_EXPONENT
    return torch.ldexp(values[codes], exponents[..., None]).flatten(-2)


def _place(name: str) -> _Place | None:
    found = _OF_EXPERT.fullmatch(name)
    if found is None:
        return None
    prefix, number, part, kind = found.groups()
    turns = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[part]
    stored = f"{prefix}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
    is_bias = kind == "bias"
    return _Place(f"{stored}_bias" if is_bias else stored, int(number), turns, is_bias)
