"""Codes and scales of a folder that is published in FP8, read as they are.

Every value stays what it is: scales are widened to fp32 exactly, and a tensor's one scale is
repeated for its rows. `model.quantisation` reads what the folder says of itself; here its tensors
are held to that. Every FP8 tensor must have a scale and every scale a tensor: a missing one is an
error and never 1.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tlora_megatron.model.quantisation import BLOCK, PARTS, BaseQuantisation, PublishedFormat
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.quantised.rows import NAN_CODE
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, StoredTensor
from tlora_megatron.training.formats.hf_convert import hf_shapes
from tlora_megatron.training.formats.rank_tensors import RankTensor

_CODES = "F8_E4M3"
_POWERS = "F8_E8M0"
_SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WEIGHT = ".weight"
_NOTES = ("_scale", "_scale_inv", "_zero_point", "_g_idx", "_global_scale")
"""Ends of the names of tensors that belong to codes."""


class QuantizedSource(HFCheckpoint):
    """The safetensors of a published FP8 folder; codes are read as uint8.

    Raises:
        ValueError: as `HFCheckpoint`.
    """

    def __init__(self, directory: Path, published: PublishedFormat) -> None:
        super().__init__(directory)
        self._published = published

    def stored(self, name: str) -> StoredTensor:
        """Place of a tensor; that of codes has dtype uint8."""
        return (
            self._place(name, torch.uint8) if self.dtype(name) == _CODES else super().stored(name)
        )

    def check(self, spec: ModelSpec, quantisation: BaseQuantisation) -> None:
        """Holds names, types and shapes of all tensors to the folder's config.json, reading none.

        Raises:
            ValueError: naming the first tensor that is not as it must be.
        """
        quantised = _weights(spec, quantisation)
        for name in hf_shapes(spec):
            dtype = self.dtype(name)
            if (dtype == _CODES) != (name in quantised):
                wanted = _CODES if name in quantised else "float32, bfloat16 or float16"
                raise ValueError(
                    f"{name} must be {wanted}, as config.json says with its targets and the "
                    f"modules that it leaves out, got {dtype}"
                )
        for name in self.keys():
            if self.dtype(name).startswith("F8_") and not self._is_scale(name):
                self._check_codes(name)
            elif name.endswith(_NOTES):
                self._check_note(name)

    def _is_scale(self, name: str) -> bool:
        return name.endswith(f".{self._published.scale}")

    def _check_codes(self, name: str) -> None:
        if self.dtype(name) != _CODES:
            raise ValueError(f"{name} must be {_CODES}, got {self.dtype(name)}")
        scale = self._scale_of(name)
        if scale not in self._file_of:
            raise ValueError(f"{name} must have its scales in {scale}, got none")
        shape = self.shape(name)
        allowed = _scale_shapes(shape, self._published.strategy) if len(shape) == 2 else ()
        if self.shape(scale) not in allowed:
            raise ValueError(
                f"{scale} must have shape {' or '.join(str(list(s)) for s in allowed)} over "
                f"{list(shape)} codes, got {list(self.shape(scale))}"
            )
        if self.dtype(scale) not in (*_SCALES, _POWERS):
            kinds = f"{', '.join(_SCALES)} or {_POWERS}"
            raise ValueError(f"{scale} must be {kinds}, got {self.dtype(scale)}")

    def _check_note(self, name: str) -> None:
        """Refuses a scale without codes, and what other ways of quantising leave."""
        weight = name.removesuffix(f".{self._published.scale}") + _WEIGHT
        if not self._is_scale(name):
            scale = f"*.{self._published.scale}"
            raise ValueError(f"tensors beside codes must be {scale}, got {name}")
        if weight not in self._file_of or self.dtype(weight) != _CODES:
            found = self.dtype(weight) if weight in self._file_of else "no such tensor"
            raise ValueError(f"{weight} must be {_CODES}, as {name} belongs to it, got {found}")

    def _scale_of(self, name: str) -> str:
        return f"{name.removesuffix(_WEIGHT)}.{self._published.scale}"

    def read_codes(self, name: str, rows: slice | None = None) -> Tensor:
        """Rows of a weight's codes, uint8."""
        return self._slice(name)[rows or slice(None)].view(torch.uint8)

    def scales(self, name: str) -> Tensor:
        """All scales of a weight, fp32: `[N]`, or those of its blocks.

        Raises:
            ValueError: if one is negative or not finite.
        """
        stored = self._slice(self._scale_of(name))
        wide = _widened(stored[...] if not stored.get_shape() else stored[:], stored.get_dtype())
        if not (wide.isfinite() & (wide >= 0)).all():
            raise ValueError(f"{self._scale_of(name)} must be finite and not negative")
        if self._published.strategy == "block":
            return wide
        return wide.flatten().expand(self.shape(name)[0]).contiguous()

    def put_scales(self, tensor: RankTensor, scales: Tensor) -> None:
        """Fills the scales of a rank's tensor."""
        put = self._put_blocks if self._published.strategy == "block" else self._put_channels
        put(tensor, scales)

    def _put_channels(self, tensor: RankTensor, scales: Tensor) -> None:
        places = tensor.units_of(scales)
        for piece in tensor.pieces:
            part = self.scales(piece.source)[piece.rows]
            window = places[:, piece.begin : piece.begin + piece.width]
            window.copy_(part.view(window.shape))

    def _put_blocks(self, tensor: RankTensor, scales: Tensor) -> None:
        """Moves whole blocks; `model.quantisation.check_block_layout` has seen that none is cut."""
        per_unit = tensor.num_rows // tensor.units
        for piece in tensor.pieces:
            source = self.scales(piece.source)
            cols = slice(None) if piece.cols is None else _blocks(piece.cols)
            for unit in range(tensor.units):
                first, begin = unit * per_unit + piece.begin, piece.rows.start + unit * piece.width
                to = _blocks(slice(first, first + piece.width))
                taken = source[_blocks(slice(begin, begin + piece.width)), cols]
                scales[to].copy_(taken)


def all_numbers(codes: Tensor) -> Tensor:
    """A scalar on the codes' device: False if there is a NaN among them."""
    return ((codes & NAN_CODE) != NAN_CODE).all()


def _weights(spec: ModelSpec, quantisation: BaseQuantisation) -> set[str]:
    return {
        f"{spec.module_path(layer, target)}{_WEIGHT}"
        for layer, linear in quantisation.linears
        for target in PARTS[linear]
    }


def _blocks(run: slice) -> slice:
    assert run.start % BLOCK[0] == 0, f"a run must begin with a block, got {run}"
    return slice(run.start // BLOCK[0], -(-run.stop // BLOCK[0]))


def _scale_shapes(shape: tuple[int, ...], strategy: str) -> tuple[tuple[int, ...], ...]:
    rows, columns = shape
    if strategy == "channel":
        return (rows, 1), (rows,)
    if strategy == "tensor":
        return (), (1,)
    return ((-(-rows // BLOCK[0]), -(-columns // BLOCK[1])),)


def _widened(stored: Tensor, dtype: str) -> Tensor:
    """Scales in fp32, exactly; bytes of UE8M0 are exponents."""
    if dtype != _POWERS:
        return stored.float()
    exponents = stored.view(torch.uint8).to(torch.int32)
    # The bits of fp32: 0 is 2 ** -127, which is no normal number, and 255 is none at all.
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)
    return bits.to(torch.int32).view(torch.float32)
