"""What `scripts/chaos.py` does to a service harms nobody."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.launch import HANG_S, REPO, environment


@pytest.mark.skipif("TLORA_ALL_TESTS" not in os.environ, reason="takes minutes: TLORA_ALL_TESTS=1")
@pytest.mark.parametrize("attack", ["connections", "generated", "broken", "disk", "queue"])
def test_strangers_harm_nobody(attack: str) -> None:
    command = [sys.executable, "-m", "scripts.chaos", attack]
    done = subprocess.run(
        command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=HANG_S
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout)
