"""The speed of a replica, in whole numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tlora_megatron.model.deployment import ReplicaRate


def test_a_sequence_costs_its_rows_and_their_square() -> None:
    assert ReplicaRate(token_ps=10, square_ps=3, longest=9).sequence_ps(5) == 50 + 75


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"token_ps": 0}, "token_ps"), ({"square_ps": -1}, "square_ps"), ({"fixed_ps": 0.5}, "fixed")],
)
def test_rates_are_whole_numbers(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}.* must be a whole number"):
        ReplicaRate(**{"token_ps": 1, "square_ps": 0, "longest": 8} | wrong)
