"""The portion that a service gives a job."""

from __future__ import annotations

import pytest

from tlora_megatron.config.rules import portion_of


@pytest.mark.parametrize(
    ("lengths", "batch_size", "micro_batch_tokens", "expected"),
    [
        (((64, 1.0),), 16, 8192, 1024),  # an exact multiple gets no second step
        (((65, 1.0),), 16, 8192, 2048),
        (((1, 1.0),), 1, 8192, 1024),
        (((4096, 1.0),), 64, 8192, 4096),  # at most half the micro-batch
        (((4096, 1.0),), 64, 1500, 750),  # even where that is no multiple
        (((5, 1.0),), 1, 1, 1),
        (((10, 0.9), (1000, 0.1)), 16, 16384, 5120),  # 16 x 109 + 2 x 4 x 297
        (((100, 1 / 3), (200, 1 / 3), (300, 1 / 3)), 4, 8192, 2048),
    ],
)
def test_the_least_multiple_that_covers_a_batch(
    lengths: tuple[tuple[int, float], ...], batch_size: int, micro_batch_tokens: int, expected: int
) -> None:
    assert portion_of(lengths, batch_size, micro_batch_tokens) == expected
