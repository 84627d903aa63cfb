"""Layouts: layers of pipeline stages, where unlike replicas lie, their short form and speed."""

from __future__ import annotations

from typing import Any

import pytest

from tlora_megatron.config.reader import ConfigError
from tlora_megatron.model.dispatch import ReplicaRate
from tlora_megatron.model.layout import Deployment, ReplicaLayout, stage_sizes


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((80, 4), (20,) * 4),
        ((5, 1), (5,)),
        ((126, 16, 7, 7), (7, *[8] * 14, 7)),
        ((80, 6, 12, 12), (12, 14, 14, 14, 14, 12)),
        ((4, 2, 3), (3, 1)),
        ((4, 2, None, 1), (3, 1)),
        ((4, 2, 3, 1), (3, 1)),
        ((10, 3, 4), (4, 3, 3)),
    ],
)
def test_other_stages_share_the_rest(sizes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert stage_sizes(*sizes) == expected


@pytest.mark.parametrize("sizes", [(4, 2, 4), (4, 2, 3, 2), (9, 3, 4), (4, 3, 3, 1), (3, 1, 2)])
def test_stages_without_an_equal_share_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"must leave equally many of {sizes[0]} layers"):
        stage_sizes(*sizes)


MIXED = "1xCP8@65536 + 2xTP2+SP@12288/selective + 4xTP1@6144"


def test_the_short_form_is_read_and_printed() -> None:
    deployment = Deployment.parse(MIXED)
    assert str(deployment) == MIXED
    assert [layout.size for layout in deployment.replicas] == [8, 2, 2, 1, 1, 1, 1]
    assert deployment.replicas[1] == ReplicaLayout(
        tp_size=2, sequence_parallel=True, micro_batch_tokens=12288, recompute="selective"
    )
    assert not deployment.is_alike
    assert deployment.atoms == 2
    assert deployment.longest(4096) == 65536
    assert len(deployment.kinds) == 3


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("tp2+1xTP1", "1xTP2 + 1xTP1"),
        ("TP1 + TP2+SP+PP2+CP2", "1xTP2+SP+PP2+CP2 + 1xTP1"),
        ("4 x TP1+SP", "4xTP1"),
        ("1xTP1@64 + 1xTP1@64", "2xTP1@64"),
    ],
)
def test_forms_that_are_printed_otherwise(text: str, printed: str) -> None:
    assert str(Deployment.parse(text)) == printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2xDP2", "TPn, PPn, CPn or SP, got 'DP2'"),
        ("TP2+TP4", "name each size once"),
        ("2xTP2/some", "recompute one of none, selective, full"),
        ("", "be replicas like"),
        ("0xTP2", "count must be at least 1"),
        ("2xTP2@many", "be replicas like"),
    ],
)
def test_what_is_no_short_form_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Deployment.parse(text)


def test_every_rank_has_one_place() -> None:
    deployment = Deployment.parse("1xTP1 + 1xTP2+PP3 + 2xTP2+CP2 + 1xCP4+PP2")
    assert deployment.world_size == 1 + 6 + 8 + 8
    places = [(deployment.placed(r).index, *deployment.placed(r).place_of(r)) for r in range(23)]
    assert len(set(places)) == 23
    for replica in deployment.placed_replicas():
        layout = replica.layout
        assert replica.first_rank % (layout.tp_size * layout.cp_size) == 0
        grid = {replica.place_of(rank) for rank in replica.ranks}
        tp, pp, cp = layout.grid
        assert grid == {(t, p, c) for t in range(tp) for p in range(pp) for c in range(cp)}
    with pytest.raises(IndexError, match="below 23"):
        deployment.placed(23)


def test_properties_of_all_replicas() -> None:
    deployment = Deployment.parse("1xTP4+PP2 + 1xTP1+PP3 + 2xTP2")
    assert deployment.most_stages == 3
    assert deployment.atoms == 4
    assert deployment.stage_borders(12) == (0, 4, 6, 8, 12)
    assert not deployment.tp_is_alike
    assert Deployment.parse("1xTP2@64 + 1xTP2+PP2").tp_is_alike
    assert Deployment.parse("3xTP2+CP2").is_alike


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"token_ps": 0}, "token_ps"), ({"square_ps": -1}, "square_ps"), ({"fixed_ps": 0.5}, "fixed")],
)
def test_rates_are_whole_numbers(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}.* must be a whole number"):
        ReplicaRate(**{"token_ps": 1, "square_ps": 0, "longest": 8} | wrong)
