"""Runs Megatron-core's local (not Transformer Engine) dense models where there is no CUDA.

Megatron-core assumes CUDA in a handful of places; gloo itself offers every collective it uses.
`install` replaces these places and nothing else. It covers what `GPTModel` without experts needs
for tensor, sequence, pipeline and context parallelism, recompute and the pipeline schedules. It
does not cover experts, Megatron's optimizers and trainer, CUDA graphs, or distributed checkpoints.

With gloo, `deallocate_pipeline_outputs` must stay off: an asynchronous send would read freed
storage.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.ops.cpu_products import keep_rows_apart

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Makes Megatron-core run on the CPU; does nothing where there is CUDA, or the second time."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    keep_rows_apart()
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    # Megatron passes it as `device=` wherever it allocates a parameter or a receive buffer.
    torch.cuda.current_device = _current_device  # type: ignore[assignment]
    # Called after a batched exchange between pipeline stages; gloo's requests are waited for.
    torch.cuda.synchronize = _synchronize
    # Megatron's seeding: the "CUDA generator" is the CPU's default generator.
    torch.cuda.manual_seed = _manual_seed
    torch.cuda.get_rng_state = _get_rng_state
    # What the tracker and recompute use; the originals index `torch.cuda.default_generators`.
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    # They warn whenever the CPU generator moves in their context, which now is what they do.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    # The schedules count tokens in `torch.zeros([], device="cuda")`.
    schedules.torch = _TorchOnCPU()
    logger.info("no CUDA: Megatron-core runs on the CPU")


class _TorchOnCPU:
    """The `torch` module as the pipeline schedules see it: `zeros` of any device are on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """`torch.zeros`, on the CPU."""
        return torch.zeros(*size, device=_CPU, **kwargs)


def _current_device() -> torch.device:
    return _CPU


def _synchronize(device: Any = None) -> None:
    del device


def _manual_seed(seed: int) -> None:
    # Not `torch.manual_seed`: it seeds CUDA as well.
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(*_: Any, **__: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)
