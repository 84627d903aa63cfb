"""Sources of weights under Hugging Face's names: a safetensors directory, or seeded noise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_RANDOM_STD = 0.02
"""`initializer_range` of every supported architecture."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Rows = slice | list[slice] | None


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
        names = self._find_files()
        self._files = {name: _open(self._directory / name) for name in names}
        self._file_of = {key: name for name, file in self._files.items() for key in file.keys()}  # noqa: SIM118

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
            ValueError: if there is no tensor of that name, or it is quantised.
        """
        stored = self._slice(name)
        runs = rows if isinstance(rows, list) else [rows or slice(None)]
        parts = [stored[run] if cols is None else stored[run, cols] for run in runs]
        if parts[0].dtype not in _DTYPES:
            raise ValueError(
                f"{name} must be float32, bfloat16 or float16 (not quantised), got {parts[0].dtype}"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ValueError(
                f"{self._directory} must hold the tensor {name}, got {len(self._file_of)} others"
            )
        return self._files[self._file_of[name]].get_slice(name)

    def _find_files(self) -> list[str]:
        directory = self._directory
        index = directory / _INDEX
        if index.is_file():
            names = _read_index(index)
            missing = [name for name in names if not (directory / name).is_file()]
            if missing:
                raise ValueError(f"{index} must name files that exist, got {', '.join(missing)}")
            return names
        if (directory / _SINGLE).is_file():
            return [_SINGLE]
        found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        pickles = [name for name in found if name.endswith((".bin", ".pt", ".pth"))]
        if pickles:
            raise ValueError(
                f"weights in {directory} must be safetensors, got {pickles[0]} (pickle)"
            )
        raise ValueError(f"{directory} must hold {_SINGLE} or {_INDEX}, got {found or 'no files'}")


def _read_index(index: Path) -> list[str]:
    try:
        names = json.loads(index.read_text())["weight_map"].values()
        return sorted({str(name) for name in names})
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} must be JSON with a weight_map, got {error!r}") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} must be a complete safetensors file, got {error}") from error


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
