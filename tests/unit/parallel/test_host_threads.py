"""A rank's share of its node's cores."""

from __future__ import annotations

import pytest

from tlora_megatron.parallel import groups as module
from tlora_megatron.parallel.groups import host_threads


@pytest.mark.parametrize(
    ("ranks", "most", "expected"), [(None, 4, 4), ("1", 64, 12), ("4", 8, 3), ("32", 8, 1)]
)
def test_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, ranks: str | None, most: int, expected: int
) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert host_threads(most) == expected
