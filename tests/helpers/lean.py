"""Leaves out of runs of tiny models what costs more than their training and is not under test."""

from __future__ import annotations

import gc
import sys


def draw_no_reports() -> None:
    """Hides matplotlib, without which a run warns that it has no report and goes on.

    Drawing takes a second of CPU time a run, a quarter of its training. tests/unit/training/report
    draws, and so do runs that ask for it.
    """
    sys.modules["matplotlib"] = None  # type: ignore[assignment]


def compile_no_collective() -> None:
    """Keeps DeepSpeed from compiling a minute's C++ for a collective that inference alone uses."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def keep_imports_from_collector() -> None:
    """Spares the next run's garbage collection all that is alive, most of it imported modules.

    A run begins with a full collection and gives back at its end what it had set aside.
    """
    gc.freeze()
