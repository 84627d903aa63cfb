"""Sources of weights under Hugging Face's names: a folder, gpt-oss's experts, or noise.

A stored layer of gpt-oss holds all experts in one tensor: `gate_up_proj` `[E, H, 2 I]`, features in
before features out, gate and up taking turns among the latter, and `down_proj` `[E, I, H]`. Or it
holds them in MXFP4: `*_blocks` `[E, out, in / 32, 16]` with two 4-bit floats a byte, the first in
the low bits, and `*_scales` `[E, out, in / 32]`, an exponent of two, plus 127, for each 32 of them.
Here they have the names that other bases' files give them: `experts.7.gate_proj.weight` `[I, H]`.

Shapes: E experts, H hidden features, I features inside an expert.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.model.weight_files import weight_files

_RANDOM_STD = 0.02
"""`initializer_range` of every supported architecture."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of a safetensors header that a base may have."""

Rows = slice | list[slice] | None


class StoredTensor(NamedTuple):
    """Place of a tensor's bytes, row by row."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """A source of whole tensors under Hugging Face's names."""

    def keys(self) -> Sequence[str]:
        """Names of all tensors, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""

    def read(self, name: str, rows: Rows = None, cols: slice | None = None) -> Tensor:
        """Part of a tensor: `rows` of dim 0 (runs are joined), `cols` of dim 1; None takes all."""


class HFCheckpoint:
    """The safetensors of a Hugging Face directory, one file or several with an index, read lazily.

    Raises:
        ValueError: if there are no safetensors, a file is missing, truncated or corrupt, or the
            index is malformed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = Path(directory)
        self._files = {path: _open(path) for path in weight_files(self._directory)}
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._file_of = {key: path for path, file in self._files.items() for key in file.keys()}  # noqa: SIM118

    def keys(self) -> list[str]:
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, rows: Rows = None, cols: slice | None = None) -> Tensor:
        """Part of a tensor in its stored dtype on the CPU; see `WeightSource.read`.

        Raises:
            ValueError: if there is no tensor of that name, it is quantised, or what is read holds
                NaN or infinity.
        """
        stored = self._slice(name)
        _check_dtype(name, stored.get_dtype())
        runs = rows if isinstance(rows, list) else [rows or slice(None)]
        parts = [stored[run] if cols is None else stored[run, cols] for run in runs]
        part = parts[0] if len(parts) == 1 else torch.cat(parts)
        if part.numel() and not all_finite(part):
            raise self.not_finite(name)
        return part

    def read_bytes(self, name: str, rows: slice) -> Tensor:
        """Rows of a tensor of bytes, whatever they mean."""
        return self._slice(name)[rows].view(torch.uint8)

    def stored(self, name: str) -> StoredTensor:
        """Place of a tensor, for those who read it themselves."""
        return self._place(name, _check_dtype(name, self.dtype(name)))

    def _place(self, name: str, dtype: torch.dtype) -> StoredTensor:
        path = self._file_of[name]
        if path not in self._headers:
            self._headers[path] = _read_header(path)
        data_begin, header = self._headers[path]
        offset = data_begin + header[name]["data_offsets"][0]
        return StoredTensor(path, offset, dtype, self.shape(name))

    def dtype(self, name: str) -> str:
        """A tensor's type, as safetensors spells it."""
        return str(self._slice(name).get_dtype())

    def not_finite(self, name: str) -> ValueError:
        """The error for a tensor with NaN or infinity, which no job could train over."""
        return ValueError(
            f"{name} of {self._file_of[name]} must be finite, got NaN or infinity: the base model "
            "is damaged; fetch or convert it anew"
        )

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ValueError(
                f"{self._directory} must hold the tensor {name}, got {len(self._file_of)} others"
            )
        return self._files[self._file_of[name]].get_slice(name)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} must be a complete safetensors file, got {error}") from error


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors' bytes begin, and the header of a file that `safe_open` has checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


def _check_dtype(name: str, dtype: str) -> torch.dtype:
    if dtype not in _DTYPES:
        raise ValueError(
            f"{name} must be float32, bfloat16 or float16 (not quantised), got {dtype}"
        )
    return _DTYPES[dtype]


def all_finite(values: Tensor) -> Tensor:
    """A scalar on the values' device: False if there is NaN or infinity among them.

    `isfinite` of all values takes a CPU ten times as long, and the memory of another tensor.
    """
    low, high = torch.aminmax(values)
    return low.isfinite() & high.isfinite()


def part_of(whole: Tensor, rows: Rows, cols: slice | None) -> Tensor:
    """Copies part of a tensor that is at hand; see `WeightSource.read`."""
    runs = rows if isinstance(rows, list) else [rows or slice(None)]
    picked = torch.cat([whole[run] for run in runs])
    return picked if cols is None else picked[:, cols]


class RandomWeights:
    """Normal matrices, unit norms and zero biases that depend on (seed, tensor name), on no layout.

    Every rank draws a whole tensor on `device` and keeps its part: quick on a GPU, and a model that
    is small enough to train on a CPU takes moments. CPU and GPU draw different numbers.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._shapes = dict(shapes)
        self._seed, self._device, self._dtype = seed, device, dtype

    def keys(self) -> list[str]:
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, rows: Rows = None, cols: slice | None = None) -> Tensor:
        """Part of a tensor on this source's device; see `WeightSource.read`."""
        return part_of(self._whole(name), rows, cols)

    def _whole(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            fill = 0.0 if name.endswith(".bias") else 1.0
            return torch.full(shape, fill, device=self._device, dtype=self._dtype)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.empty(shape, device=self._device, dtype=self._dtype)
        return values.normal_(0.0, _RANDOM_STD, generator=generator)


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

    Args:
        device: where experts are decoded and returned.
    """

    def __init__(self, checkpoint: HFCheckpoint, device: torch.device) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._names = set(checkpoint.keys())
        self._last: tuple[tuple[str, int], Tensor] | None = None

    def keys(self) -> list[str]:
        return self._checkpoint.keys()

    def shape(self, name: str) -> tuple[int, ...]:
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
        return part_of(self._expert(place)[place.turns], rows, cols)

    def check_counts(self, num_layers: int, num_experts: int) -> None:
        """Holds every layer's tensors to the number of experts."""
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
