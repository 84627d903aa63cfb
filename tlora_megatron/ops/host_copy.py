"""Copies from the host that do not wait for the device."""

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


def device_tables(tables: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """Copies tables to a device by one copy, without waiting: int32, flat, each at 16 bytes."""
    begins = [0, *itertools.accumulate(-(-table.size // 4) * 4 for table in tables.values())]
    pinned = device.type == "cuda"
    host = torch.zeros(begins[-1], dtype=torch.int32, pin_memory=pinned)
    values, spans = host.numpy(), {}
    for (name, table), begin in zip(tables.items(), begins, strict=False):
        spans[name] = slice(begin, begin + table.size)
        values[spans[name]] = table.ravel()
    copy = host.to(device, non_blocking=pinned)
    return {name: copy[span] for name, span in spans.items()}
