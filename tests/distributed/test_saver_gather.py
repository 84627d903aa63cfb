"""Adapters whose parts lie on two processes are saved whole, over gloo."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.standing_world import world

WORKER = Path(__file__).parents[1] / "helpers" / "saver_gather_worker.py"


def test_parts_of_two_processes_are_gathered(tmp_path: Path) -> None:
    log = world(WORKER, 2, tmp_path)
    assert "saved tensor parallel" in log
    assert "saved slices" in log
