"""What `tune.py` searches: values of every field of a kernel's blocks, and how it walks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tlora_megatron.ops.lora.triton.config import KernelConfig

_BACKWARD = {
    "rows_per_run": (512, 1024, 2048),
    "item_size": (65536, 131072, 262144),
    "block_columns": (64, 128, 256),
    "step_rows": (32, 64, 128),
    "num_stages": (2, 3, 4, 5),
    "num_warps": (4, 8),
}
SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "down": {
        "splits": (1, 2, 4),
        "block_rows": (32, 64, 128),
        "block_depth": (32, 64, 128),
        "num_stages": (3, 4, 5),
        "num_warps": (4, 8),
        "rank_tile": (64, 128),
    },
    "up": {
        "block_rows": (32, 64, 128),
        "block_columns": (64, 128, 256),
        "num_warps": (4, 8),
    },
    "backward_up": {
        **_BACKWARD,
        "block_rows": (32, 64, 128),
        "block_depth": (32, 64, 128),
        "split_columns": (1024, 2048, 4096),
        "region_rows": (512, 1024, 2048, 4096),
        "rank_tile": (64, 128),
    },
    "backward_down": {**_BACKWARD, "rank_tile": (64, 128)},
}
"""By kernel and field, the fields that mattered most first."""
SIZE_OF = {
    "down": "in_size",
    "up": "out_size",
    "backward_up": "out_size",
    "backward_down": "in_size",
}
"""The dimension that a kernel's work grows with: what its size buckets are bounded by."""
GAIN = 0.99
"""A candidate must beat the best by 1 %, about the noise of a median."""


class Found(NamedTuple):
    """One candidate and its time."""

    config: Any
    """Of `KernelConfig.down` or another of its fields."""
    us: float
    """inf where it is invalid or does not run."""


def neighbours(kernel: str, config: Any, field: str) -> Iterator[Any]:
    """Valid blocks that differ from `config` in one field only."""
    for value in SPACE[kernel][field]:
        candidate = dataclasses.replace(config, **{field: value})
        if candidate == config:
            continue
        try:
            KernelConfig(**{kernel: candidate})
        except ValueError:
            continue
        yield candidate


def search(
    kernel: str, start: Any, time_us: Callable[[Any], float], *, in_time: Callable[[], bool]
) -> Iterator[Found]:
    """Coordinate descent: each field in turn, from the best found so far; yields all it times."""
    best = Found(start, time_us(start))
    yield best
    for field in SPACE[kernel]:
        for candidate in neighbours(kernel, best.config, field):
            if not in_time():
                return
            found = Found(candidate, time_us(candidate))
            yield found
            if found.us < GAIN * best.us:
                best = found


def best_of(found: list[Found]) -> Found:
    """What `search` ends at: the first unless another is faster by more than noise."""
    best = found[0]
    for candidate in found[1:]:
        if candidate.us < GAIN * best.us:
            best = candidate
    return best


def search_length(kernel: str) -> int:
    """Candidates of one search, about."""
    return 1 + sum(len(values) - 1 for values in SPACE[kernel].values())
