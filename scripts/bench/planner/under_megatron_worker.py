"""One rank of a case under Megatron-LM: `under_megatron_worker.py [--cpu] pretrain_gpt.py ARGS`.

Times iterations of the trainer: the time from the beginning of one to that of the next.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Here already: a checkout has a folder `scripts` too.
from scripts.bench.flag_speed.watched import Iteration, launch_watched


class IterationTimer:
    """Times the iterations of a window, and counts what they hold.

    Args:
        first: number of the first iteration that is timed.
        size: number of iterations.
    """

    def __init__(self, first: int, size: int, result: Path) -> None:
        self._first, self._size, self._result = first, size, result
        self._count = self._tokens = 0
        self._begin = 0.0

    def iteration(self, session: Any, run: Any) -> Any:
        """Runs one iteration of the trainer."""
        from scripts.bench.harness.clock import wait_for_all

        number = self._count
        self._count += 1
        if number == 0:
            self._watch(session)
        if number == self._first:
            self._tokens = 0
            wait_for_all()
            self._begin = time.perf_counter()
        if number == self._first + self._size:
            wait_for_all()
            self._finish(session, time.perf_counter() - self._begin)
        return run()

    def _watch(self, session: Any) -> None:
        from scripts.bench.flag_speed.turns import real_tokens

        feed = session._feed
        fill = feed.fill

        def watched(batches: Sequence[Any]) -> None:
            self._tokens += real_tokens(batches)
            fill(batches)

        feed.fill = watched

    def _finish(self, session: Any, seconds: float) -> None:
        """Writes what was measured; every rank of a replica has counted the replica's tokens."""
        from scripts.bench.harness.clock import is_main, largest, peak_bytes, summed
        from scripts.bench.harness.rows import gpu_name, versions

        layout = session.loop.super_model.groups.layout
        (tokens,) = summed([float(self._tokens)])
        (peak,) = largest([float(peak_bytes())])
        if is_main():
            measured = {
                "gpu": gpu_name(),
                "versions": versions("megatron-core"),
                "seconds": seconds / self._size,
                "tokens": tokens * layout.dp_size / layout.world_size / self._size,
                "peak_bytes": int(peak),
            }
            self._result.write_text(json.dumps(measured))


def _begin() -> Iteration:
    first, size = map(int, os.environ["TLORA_PLAN_WINDOW"].split(","))
    return IterationTimer(first, size, Path(os.environ["TLORA_PLAN_RESULT"])).iteration


if __name__ == "__main__":
    launch_watched(sys.argv[1:], _begin)
