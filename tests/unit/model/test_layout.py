"""How layers are divided among the stages of a pipeline."""

from __future__ import annotations

import pytest

from tlora_megatron.model.layout import ParallelLayout, stage_sizes


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
def test_stages_that_are_not_given_share_what_is_left(
    sizes: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert stage_sizes(*sizes) == expected


@pytest.mark.parametrize("sizes", [(4, 2, 4), (4, 2, 3, 2), (9, 3, 4), (4, 3, 3, 1), (3, 1, 2)])
def test_stages_without_an_equal_share_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"must leave equally many of {sizes[0]} layers"):
        stage_sizes(*sizes)


def test_a_stage_knows_its_layers() -> None:
    layout = ParallelLayout(pp_size=3, first_stage_layers=1, last_stage_layers=2)
    assert [layout.stage_layers(6, stage) for stage in range(3)] == [
        range(1),
        range(1, 4),
        range(4, 6),
    ]
