"""Copies from the host that do not wait for the device, and tables that they replace."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to a device without waiting for the device.

    Through pinned memory: a copy out of ordinary memory waits until the stream is empty, so that
    one in every micro-batch would let the device idle while the host issues the next kernels.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


Array = np.ndarray[Any, np.dtype[np.int64]]


class FixedTables:
    """Named int32 tables in one device buffer, all written by one copy."""

    def __init__(self, capacities: Mapping[str, int], device: torch.device) -> None:
        self.capacities = dict(capacities)
        begins = [0, *itertools.accumulate(-(-n // 4) * 4 for n in capacities.values())]
        self._begins = dict(zip(capacities, begins, strict=False))
        self._blob = torch.empty(begins[-1], dtype=torch.int32, device=device)
        self._views = {
            name: self._blob[begin : begin + self.capacities[name]]
            for name, begin in self._begins.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        """A table, int32 `[capacity]`; each begins at 16 bytes."""
        return self._views[name]

    def write(self, tables: Mapping[str, Array]) -> None:
        """Replaces the contents without waiting; what a table does not fill becomes -1.

        Raises:
            ValueError: if a table exceeds its capacity.
        """
        pinned = self._blob.is_cuda
        # A fresh host buffer: the copy out of the last one may still be under way.
        host = torch.empty(self._blob.shape, dtype=torch.int32, pin_memory=pinned).fill_(-1)
        values = host.numpy()
        for name, table in tables.items():
            if table.size > self.capacities[name]:
                raise ValueError(
                    f"{name} must have at most {self.capacities[name]} entries, got {table.size}"
                )
            begin = self._begins[name]
            values[begin : begin + table.size] = table.ravel()
        self._blob.copy_(host, non_blocking=pinned)
