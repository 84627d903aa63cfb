"""`scripts/quickstart.sh --live`, for two steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import HANG_S, REPO, environment


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("TLORA_ALL_TESTS") != "1",
    reason="both clients have suites of their own: set TLORA_ALL_TESTS=1",
)
def test_two_clients_train_and_ask(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "scripts" / "quickstart_live.py"), "--steps", "2"]
    env = environment() | {"TINKER_TELEMETRY": "0"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"page: http://127\.0\.0\.1:\d+/#token=tml-tlora-", done.stdout)
    for client in ("openai", "tinker"):
        assert re.search(rf"{client}: \d+% of 16 right after 2 steps", done.stdout)
