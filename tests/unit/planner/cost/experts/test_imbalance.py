"""The fullest rank's rows against the exact means of exponential and gamma variables."""

from __future__ import annotations

import random

import pytest

from tlora_megatron.planner.cost.experts import fullest_share


@pytest.mark.parametrize("ranks", [2, 4, 8, 128])
def test_one_expert_a_rank_is_the_largest_of_exponential_variables(ranks: int) -> None:
    largest = sum(1 / n for n in range(1, ranks + 1))
    assert fullest_share(ranks, 1) == pytest.approx(largest, rel=0.015)


@pytest.mark.parametrize(("ranks", "experts"), [(2, 4), (8, 16), (64, 2)])
def test_several_experts_a_rank_are_the_largest_of_their_sums(ranks: int, experts: int) -> None:
    draw = random.Random(0)
    drawn = [
        max(draw.gammavariate(experts, 1) for _ in range(ranks)) / experts for _ in range(4000)
    ]
    assert fullest_share(ranks, experts) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)


def test_a_rank_alone_has_all_rows() -> None:
    assert fullest_share(1, 128) == 1.0


def test_more_ranks_are_less_even_and_more_experts_more() -> None:
    by_ranks = [fullest_share(ranks, 128 // ranks) for ranks in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert by_ranks == sorted(by_ranks)
    by_layers = [fullest_share(8, 16 * layers) for layers in (1, 2, 12, 48)]
    assert by_layers == sorted(by_layers, reverse=True)
    assert 1 < by_layers[-1] < 1.1
