"""Ends a process whose work is done without taking Python apart."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

_WATCHERS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD")
"""Environment variables under which something may wait for this process's ordinary exit."""


def leave(code: int) -> NoReturn:
    """Ends this process as `sys.exit` does: threads awaited, exit handlers run, output written.

    But modules are not torn down, which takes over a second of CPU time once torch and Megatron are
    imported. A profiler or debugger that needs the ordinary exit gets it.
    """
    is_watched = sys.gettrace() or sys.getprofile() or sys.flags.inspect
    if is_watched or any(name in os.environ for name in _WATCHERS):
        sys.exit(code)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # who read the output has gone; Python would end with 120
        code = code or 120
    os._exit(code)
