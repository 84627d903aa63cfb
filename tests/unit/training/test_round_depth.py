"""The depth of rounds: deeper only where all gain enough, or the smallest loses little."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.training.round_timing import DEPTHS, ENOUGH, WORTH, choose_depth, outlook

RATE = ReplicaRate(token_ps=53_000_000, square_ps=2700, fixed_ps=0, longest=16384)
"""An 8B model on an H200, about."""


def heavy_tail(mean: float, seed: int, batch_size: int = 64) -> Callable[[int], list[int]]:
    """Batches of lognormal lengths."""

    def batch(number: int) -> list[int]:
        draw = random.Random(1000 * seed + number)
        drawn = (draw.lognormvariate(math.log(mean) - 0.5, 1.0) for _ in range(batch_size))
        return [min(16384, max(16, int(rows))) for rows in drawn]

    return batch


MIX = [heavy_tail(mean, seed) for seed, mean in enumerate((250, 400, 700, 3900))]


def test_depth_grows_until_replicas_are_busy() -> None:
    outlooks = choose_depth(MIX, [RATE] * 8)
    assert [o.depth for o in outlooks] == list(DEPTHS[: len(outlooks)])
    assert outlooks[-1].depth > 1
    for before, after in itertools.pairwise(outlooks):
        assert before.busy_share < ENOUGH
        gain = after.busy_share / before.busy_share
        assert gain >= WORTH or before.smallest_speed / after.smallest_speed <= WORTH


def test_short_sequences_need_no_depth() -> None:
    (only,) = choose_depth([lambda _: [100] * 999], [RATE] * 4)
    assert only.depth == 1
    assert only.busy_share > ENOUGH


def test_the_smallest_job_is_not_slowed_for_little() -> None:
    # A round of one micro-batch a replica is 94 % busy: 15 sequences of a kind on two replicas.
    rate = ReplicaRate(token_ps=100, square_ps=0, longest=800)
    jobs = [lambda _: [100] * 200, lambda _: [110]]
    (only,) = choose_depth(jobs, [rate] * 2)
    deeper = outlook(jobs, [rate] * 2, 2)
    assert only.busy_share < deeper.busy_share < WORTH * only.busy_share
    assert only.smallest_speed > 1.5 * deeper.smallest_speed


def test_batches_that_fit_are_not_looked_at_deeper() -> None:
    (only,) = choose_depth([lambda _: [16000, 20, 20, 20]], [RATE] * 2)
    assert only.depth == 1
    assert only.busy_share < 0.6
