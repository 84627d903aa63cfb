"""Lets a benchmark be started while the one before it still measures.

Whoever starts it names a file in `TLORA_BENCH_TURN`. With its imports done the benchmark waits
until that file exists, and only then touches the GPU.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

TURN = "TLORA_BENCH_TURN"
_POLL_S = 0.02


def wait_for_turn() -> None:
    """Returns once the file that the environment names exists; at once where it names none."""
    file = os.environ.get(TURN)
    while file and not Path(file).exists():
        time.sleep(_POLL_S)
