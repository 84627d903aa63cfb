"""Keys and values of sequences that grow, so that each token goes through the model once.

Megatron-core has inference contexts of its own (0.16.1). The static one keeps rectangles of
sequences that are equally far, and the dynamic one needs CUDA and the flash-attn package and
attends inside Megatron's `Attention.forward`, which this backbone does not call. Neither knows of
packed rows that belong to adapters.

Shapes: R rows of the cache, T rows of a step, K keys of its documents, G key-value heads, D head
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """The sizes of a cache on this process."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Memory of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KeyCache:
    """Rows for keys and values of tokens; a row belongs to one sequence, or to several as a prefix.

    Rows are reserved by the token: a sequence takes all that it may ever need before it starts, so
    none has to be thrown out later.
    """

    def __init__(self, shape: CacheShape, num_rows: int, device: torch.device) -> None:
        self.shape = shape
        self.num_rows = num_rows
        sizes = (num_rows, shape.num_kv_heads, shape.head_dim)

        def rooms() -> list[Tensor]:
            return [
                torch.empty(sizes, dtype=shape.dtype, device=device)
                for _ in range(shape.num_layers)
            ]

        self._keys, self._values = rooms(), rooms()
        self._free = list(range(num_rows))

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def reserve(self, count: int) -> list[int] | None:
        """Takes rows; None if fewer are free."""
        if count > len(self._free):
            return None
        first = len(self._free) - count
        taken, self._free = self._free[first:], self._free[:first]
        return taken

    def release(self, rows: list[int]) -> None:
        """Gives rows back."""
        self._free += rows

    def extend(
        self, layer: int, key_TGD: Tensor, value_TGD: Tensor, new_T: Tensor, all_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of new rows; returns those of all, in the order asked for.

        Args:
            layer: counted from 0.
            new_T: rows that the new ones go to, int64.
            all_K: rows to read, int64.
        """
        keys, values = self._keys[layer], self._values[layer]
        keys[new_T], values[new_T] = key_TGD, value_TGD
        return keys[all_K], values[all_K]
