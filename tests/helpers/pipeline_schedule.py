"""Plays Megatron-LM's pipeline schedules through, one operation after another, without a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class _Operation(NamedTuple):
    backward: bool
    micro_batch: int
    chunk: int


def makespan(
    forward_s: Sequence[Sequence[float]], backward_s: Sequence[Sequence[float]], count: int
) -> float:
    """Time of `count` micro-batches in 1F1B, interleaved if stages have several chunks.

    Args:
        forward_s: by stage, seconds of each of its model chunks.
    """
    num_stages, num_chunks = len(forward_s), len(forward_s[0])
    queues = [_order(stage, num_stages, num_chunks, count) for stage in range(num_stages)]
    ends: dict[tuple[int, _Operation], float] = {}
    clocks, places = [0.0] * num_stages, [0] * num_stages
    left = sum(map(len, queues))
    while left:
        before = left
        for stage, queue in enumerate(queues):
            while places[stage] < len(queue):
                operation = queue[places[stage]]
                inputs = _inputs(stage, operation, num_stages, num_chunks)
                if any(given not in ends for given in inputs):
                    break
                begin = max([clocks[stage], *(ends[given] for given in inputs)])
                times = backward_s if operation.backward else forward_s
                clocks[stage] = ends[stage, operation] = begin + times[stage][operation.chunk]
                places[stage] += 1
                left -= 1
        assert left < before, "stages wait for each other"
    return max(clocks)


def _order(stage: int, num_stages: int, num_chunks: int, count: int) -> list[_Operation]:
    """A stage's operations as `forward_backward_pipelining_with(out)_interleaving` has them."""
    total = count * num_chunks
    if num_chunks == 1:
        warm_up = num_stages - stage - 1
        table = [(micro_batch, 0) for micro_batch in range(count)]
    else:
        warm_up = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
        begins = range(0, count, num_stages)
        groups = [range(begin, begin + num_stages) for begin in begins]
        table = [(m, chunk) for group in groups for chunk in range(num_chunks) for m in group]
    warm_up = min(warm_up, total)
    forward = [_Operation(False, *entry) for entry in table]
    backward = [_Operation(True, m, num_chunks - 1 - chunk) for m, chunk in table]
    steady = zip(forward[warm_up:], backward, strict=False)
    return [
        *forward[:warm_up],
        *itertools.chain.from_iterable(steady),
        *backward[total - warm_up :],
    ]


def _inputs(
    stage: int, operation: _Operation, num_stages: int, num_chunks: int
) -> list[tuple[int, _Operation]]:
    """The operations whose tensors one needs, with their stages."""
    is_backward, _, chunk = operation
    step = 1 if is_backward else -1
    if 0 <= stage + step < num_stages:
        return [(stage + step, operation)]
    if 0 <= chunk + step < num_chunks:
        return [((stage + step) % num_stages, operation._replace(chunk=chunk + step))]
    return [(stage, operation._replace(backward=False))] if is_backward else []
