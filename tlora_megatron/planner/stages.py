"""Divides layers among the stages of a pipeline, whose ends hold the embedding and the head too."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from tlora_megatron.model.spec import ModelSpec


class Ends(NamedTuple):
    """Layers of the first and the last stage; None: as many as each of the others."""

    first: int | None = None
    last: int | None = None


EVEN = Ends()


def head_layers(spec: ModelSpec, target_share: float) -> float:
    """Number of layers whose GEMMs take as long as the head's.

    Args:
        target_share: share of rows with a target; only these reach the head.
    """
    return target_share * spec.vocab_size * spec.hidden_size / spec.row_weights


@functools.lru_cache(maxsize=4096)
def divisions(num_layers: int, pp_size: int, head: float) -> tuple[Ends, ...]:
    """Ways to divide layers that are worth trying: alike, and with the slowest stage fastest.

    Megatron-core lets the first and the last stage have a number of layers of their own; all others
    are alike. Without an entry there are fewer layers than stages.

    Args:
        head: layers that the head counts for.
    """
    found = []
    slowest = math.inf
    if num_layers % pp_size == 0:
        found.append(EVEN)
        slowest = num_layers // pp_size + head
    if pp_size > 1:
        uneven = _fastest(num_layers, pp_size, head)
        if uneven is not None and uneven[0] < slowest - 1e-9:
            found.append(uneven[1])
    return tuple(found)


def _fastest(num_layers: int, pp_size: int, head: float) -> tuple[float, Ends] | None:
    """The uneven division whose slowest stage is fastest, in layers; then the most even one."""
    best: tuple[float, int, Ends] | None = None
    middles = range(1, (num_layers - 2) // (pp_size - 2) + 1) if pp_size > 2 else (0,)
    for middle in middles:
        ends = num_layers - middle * (pp_size - 2)
        even = (ends - head) / 2
        for last in {min(max(n, 1), ends - 1) for n in (math.floor(even), math.ceil(even))}:
            slowest = max(ends - last, last + head, middle)
            found = slowest, abs(ends - 2 * last), Ends(ends - last, last)
            if best is None or found < best:
                best = found
    return None if best is None else (best[0], best[2])


def pipeline_sizes(num_layers: int, head: float, most: int) -> list[int]:
    """Numbers of stages up to `most` that are worth trying where any number of GPUs may be used.

    They divide the layers, or are the fewest with which the slowest stage has so few layers.
    """
    sizes = {n for n in range(1, num_layers + 1) if num_layers % n == 0}
    for layers in range(1, num_layers + 1):
        sizes |= {-(-num_layers // layers), math.ceil((num_layers + head) / layers)}
    return sorted(n for n in sizes if n <= min(most, num_layers))
