"""Processes choose their nano-batches alike, whatever each measures."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.standing_world import world

WORKER = Path(__file__).with_name("nano_rounds_worker.py")


def test_no_process_tries_what_another_has_no_room_for(tmp_path: Path) -> None:
    output = world(WORKER, 2, tmp_path)
    ran = re.findall(r"process \d ran (\[.*\])", output)
    assert len(ran) == 2
    assert ran[0] == ran[1], "their longest times decide"
    assert set(map(int, re.findall(r"\d+", ran[0]))) == {1, 2}
    assert "more than 2 are not tried: the fullest GPU has 1.9 GiB left beside its peak" in output
