"""Sources of weights under Hugging Face's names: a safetensors directory, or seeded noise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

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
        """Names of all tensors."""

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
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor.

        Raises:
            ValueError: if there is no tensor of that name.
        """
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
        """Rows of a tensor of bytes, whatever they mean.

        Raises:
            ValueError: if there is no tensor of that name.
        """
        return self._slice(name)[rows].view(torch.uint8)

    def stored(self, name: str) -> StoredTensor:
        """Place of a tensor, for those who read it themselves.

        Raises:
            ValueError: if there is no tensor of that name, or it is quantised.
        """
        return self._place(name, _check_dtype(name, self.dtype(name)))

    def _place(self, name: str, dtype: torch.dtype) -> StoredTensor:
        path = self._file_of[name]
        if path not in self._headers:
            self._headers[path] = _read_header(path)
        data_begin, header = self._headers[path]
        offset = data_begin + header[name]["data_offsets"][0]
        return StoredTensor(path, offset, dtype, self.shape(name))

    def dtype(self, name: str) -> str:
        """A tensor's type, as safetensors spells it.

        Raises:
            ValueError: if there is no tensor of that name.
        """
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


class RandomWeights:
    """Normal matrices, unit norms and zero biases that depend on (seed, tensor name), on no layout.

    Every rank draws a whole tensor on `device` and keeps its part: quick on a GPU, and a model that
    is small enough to train on a CPU takes moments. CPU and GPU draw different numbers.

    Args:
        shapes: of every tensor, by name.
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
        """Names of all tensors."""
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str, rows: Rows = None, cols: slice | None = None) -> Tensor:
        """Part of a tensor on this source's device; see `WeightSource.read`."""
        whole = self._whole(name)
        runs = rows if isinstance(rows, list) else [rows or slice(None)]
        picked = torch.cat([whole[run] for run in runs])
        return picked if cols is None else picked[:, cols]

    def _whole(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            fill = 0.0 if name.endswith(".bias") else 1.0
            return torch.full(shape, fill, device=self._device, dtype=self._dtype)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.empty(shape, device=self._device, dtype=self._dtype)
        return values.normal_(0.0, _RANDOM_STD, generator=generator)
