"""Sets the number of queues that the GPU takes work from, CUDA_DEVICE_MAX_CONNECTIONS.

With one queue kernels start in launch order over all streams. Megatron asks for that: a collective
issued before the compute that hides it starts first. Nano-batches need the contrary: what waits for
another GPU must hold up its own stream alone. Streams are dealt to queues in turn; CUDA's default
of 8 is fewer than a step may have (main, one a nano-batch, NCCL's of every group), so they get the
most there are. On 4 H200s one queue takes copy engines' hidden share from 92-97 % to below 45 %.

Which of CUDA's first calls reads the variable is not documented: it is set before all of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger(__name__)

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_IN_ORDER, _BESIDE = "1", "32"


def set_queues(*, overlaps: bool) -> None:
    """Sets CUDA_DEVICE_MAX_CONNECTIONS, unless the user did.

    A 1 is replaced for nano-batches all the same, because Megatron's own launchers set it.

    Args:
        overlaps: nano-batches are going to hide each other's communication.
    """
    given = os.environ.get(VARIABLE)
    if not overlaps:
        os.environ.setdefault(VARIABLE, _IN_ORDER)
    elif given in (None, _IN_ORDER):
        os.environ[VARIABLE] = _BESIDE
        if given is not None and torch.cuda.is_initialized():
            logger.warning(
                "nano-batches hide less than they could: CUDA started with %s=%s, which must be %s",
                VARIABLE, given, _BESIDE,
            )  # fmt: skip


@contextmanager
def shown_in_order() -> Iterator[None]:
    """Shows 1 to code that insists on it, while CUDA has what `set_queues` set."""
    true = os.environ.get(VARIABLE)
    if true is None:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.init()  # what the code below would do, with the variable as it shows
    os.environ[VARIABLE] = _IN_ORDER
    try:
        yield
    finally:
        os.environ[VARIABLE] = true
