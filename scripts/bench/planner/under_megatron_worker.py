"""One rank of a case under Megatron-LM: `under_megatron_worker.py [--cpu] pretrain_gpt.py ARGS`.

Does what `-m tlora_megatron.launch` does, and times iterations of the trainer: the time from the
beginning of one to that of the next. Nothing is compiled in the checkout.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scripts.bench.flag_speed.cases  # noqa: F401 - a checkout has a folder `scripts` too
from tlora_megatron import launch


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
        from scripts.bench.harness.clock import peak_bytes
        from scripts.bench.harness.rows import gpu_name, versions
        from scripts.bench.harness.world import is_main, largest, summed

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


def _install() -> None:
    _install_hooks()
    from tlora_megatron.integrations.megatron_lm.session import Session

    initialize: Any = importlib.import_module("megatron.training.initialize")
    initialize._compile_dependencies = lambda *_: None
    first, size = map(int, os.environ["TLORA_PLAN_WINDOW"].split(","))
    timer = IterationTimer(first, size, Path(os.environ["TLORA_PLAN_RESULT"]))
    train_step = Session.train_step

    def timed(session: Any, run_step: Any) -> Any:
        return timer.iteration(session, lambda: train_step(session, run_step))

    Session.train_step = timed  # type: ignore[method-assign]


_install_hooks = launch.install

if __name__ == "__main__":
    if not hasattr(typing, "override"):  # from Python 3.12 on, which newer checkouts ask for
        typing.override = lambda method: method
    launch.install = _install
    launch.main(sys.argv[1:])
