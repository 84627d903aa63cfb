"""Writers and controllers are SIGKILLed at random moments: what was acknowledged is kept, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import HANG_S

_ALL = bool(os.environ.get("TLORA_ALL_TESTS"))
PLACES = ["sqlite", *["postgres"] * _ALL]


def _chaos(kind: str, place: str, folder: Path, kills: int) -> dict[str, int]:
    module = [sys.executable, "-m", "tests.helpers.store_chaos"]
    done = subprocess.run(
        [*module, kind, place, str(folder), str(kills), "7"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counted


# A server of its own for this file would cost more than what it shows beyond SQLite's.
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_no_acknowledged_submit_is_lost_or_made_twice(place: str, tmp_path: Path) -> None:
    kills = 40 if _ALL else 4
    counted = _chaos("writers", place, tmp_path, kills)
    assert counted["acknowledged"] >= kills


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_controller_may_be_killed_at_any_moment(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "gangs"
    folder.mkdir()
    kills = 50 if _ALL else 3
    counted = _chaos("controllers", place, folder, kills)
    assert counted["kills"] == kills
    assert counted["leases"] >= counted["jobs"] > 0
