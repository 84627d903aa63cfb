"""Tensor-parallel collectives over gloo: sums in rank order, in whatever order they are asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.standing_world import world

WORKER = Path(__file__).parents[1] / "helpers" / "collectives_case.py"


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("kind", ["auto", "gloo"])
def test_gloo(processes: int, kind: str) -> None:
    assert "gloo: all equal" in world(WORKER, processes, "cpu", kind)


def test_two_groups_beside_each_other() -> None:
    assert "gloo: all equal" in world(WORKER, 4, "cpu", "gloo", "halves")
