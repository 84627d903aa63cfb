"""Starts CUDA while Python still imports: its context and cuBLAS take a second or two."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import torch


def wake_device() -> threading.Thread:
    """Makes this process's GPU ready on a thread; nothing happens where there is none.

    What CUDA reads from the environment must be set before (`parallel.overlap`).
    Whoever uses the device later waits for this, and says what is wrong with it.
    """
    thread = threading.Thread(target=_wake, name="wake device", daemon=True)
    thread.start()
    return thread


def _wake() -> None:
    with suppress(RuntimeError, AssertionError):
        if not torch.cuda.is_available():
            return
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        square = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.matmul(square, square)
        torch.cuda.synchronize(device)
