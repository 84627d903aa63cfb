"""The portion of a job's batch that a service chooses when it accepts the job."""

from __future__ import annotations

import math
from collections.abc import Iterable

STEP_TOKENS = 1024
"""Portions are multiples of it, so that jobs of like load get the same and share rounds well."""


def portion_of(
    lengths: Iterable[tuple[int, float]], batch_size: int, micro_batch_tokens: int
) -> int:
    """Returns the `portion_tokens` of a job that has none: a whole batch, if there is room.

    The least multiple of 1,024 that covers nearly all batches (two standard deviations above the
    mean), but at most half a micro-batch, so that two jobs always fit into one. It depends on the
    job and the service's micro-batch alone, never on a gang or a neighbour: fixed at acceptance,
    it keeps the job's bits wherever the job goes.

    Args:
        lengths: pairs of rows and share of sequences, whose shares add up to 1.
        micro_batch_tokens: rows of a micro-batch.
    """
    pairs = tuple(lengths)
    mean = sum(rows * share for rows, share in pairs)
    variance = max(0.0, sum(rows * rows * share for rows, share in pairs) - mean * mean)
    batch = batch_size * mean + 2 * math.sqrt(batch_size * variance)
    # The shares' rounding must not add a step to what is an exact multiple.
    steps = max(1, math.ceil(batch / STEP_TOKENS - 1e-6))
    return max(1, min(steps * STEP_TOKENS, micro_batch_tokens // 2))
