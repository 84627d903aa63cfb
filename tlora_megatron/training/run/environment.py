"""Sets up the process of a rank: the variables that libraries read, and the garbage collector."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    "MKL_CBWR": "AUTO,STRICT",
}
"""Variables that libraries read when they start. Without a workspace cuBLAS cannot divide a sum by
the number of rows; a ring adds an element of a job's own slab in the slab's own order. MKL chooses
by the number of rows how it adds: with AVX-512 below 16 rows, and over many elements (from 896 on)
beyond 128. Its strict mode, which was as fast on one core, does not."""


def set_environment(deterministic: bool) -> None:
    """Sets `ENVIRONMENT` if `run.deterministic` is set; call it before CUDA starts.

    Raises:
        ValueError: if a variable has another value, or CUDA has started without it.
    """
    if not deterministic:
        return
    late = torch.cuda.is_initialized()
    for name, value in ENVIRONMENT.items():
        given = os.environ.get(name)
        if given is not None and given != value:
            raise ValueError(
                f"{name} must be {value} with run.deterministic, got {given}: unset it"
            )
        if given is None and late:
            raise ValueError(
                f"{name} must be {value} before CUDA starts with run.deterministic, got nothing: "
                f"export {name}={value}"
            )
        os.environ[name] = value


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names under which torch reads the settings of its allocators."""


def let_segments_grow() -> None:
    """Lets torch extend its segments of GPU memory, unless a variable sets up its allocator.

    Micro-batches of unlike rows and recompute leave free blocks of all sizes between others. In
    segments of fixed size an 8B model whose tensors took 42.6 GB of an H200 reserved 48.0.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[1]] = "expandable_segments:True"


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Hides all objects made so far from Python's garbage collector.

    Tapes of nano-batches are thousands of small objects a step, each step sets the collector off,
    and it would look through a whole model's again and again (a fifth of the host's time for cuts).
    Turns the collector on, where the start of a run went without it.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()
