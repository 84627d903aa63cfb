"""Runs Megatron-core's local (not Transformer Engine) dense models where there is no CUDA.

Megatron-core assumes CUDA in a handful of places, which `install` replaces for `GPTModel` without
experts and the pipeline schedules, and `install_dispatchers` for experts; neither covers its
optimizers and trainer, CUDA graphs, or distributed checkpoints. With gloo,
`deallocate_pipeline_outputs` must stay off: an asynchronous send would read freed storage.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.ops.exactness import keep_rows_apart

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
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    # Called after a batched exchange between pipeline stages; gloo's requests are waited for.
    torch.cuda.synchronize = lambda device=None: None
    # Megatron's seeding: the "CUDA generator" is the CPU's default generator.
    torch.cuda.manual_seed = _manual_seed
    torch.cuda.get_rng_state = _get_rng_state
    # What the tracker and recompute use; the originals index `torch.cuda.default_generators`.
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # They warn whenever the CPU generator moves in their context, which now is what they do.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    # The schedules count tokens in `torch.zeros([], device="cuda")`.
    schedules.torch = _TorchOnCPU()
    logger.info("no CUDA: Megatron-core runs on the CPU")


def install_dispatchers() -> None:
    """Makes Megatron's layers of experts run on the CPU; does nothing where there is CUDA."""
    if torch.cuda.is_available():
        return
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # 0.16 asks for the name without defining it where Transformer Engine is missing.
    vars(moe_utils).setdefault("te_general_gemm", None)
    # The alltoall dispatcher copies its numbers of rows on a stream.
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = cuda.stream = NoStream
    cuda.current_stream = lambda *_, **__: NoStream()
    move = token_dispatcher.maybe_move_tensor_to_cpu
    if getattr(move, "__module__", None) == __name__:
        return

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Gives sizes of the CPU to collectives as they take those of a GPU."""
        if as_numpy and isinstance(tensor, Tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move_to_cpu
    _exchange_uneven_rows()


def _exchange_uneven_rows() -> None:
    """Lets ranks that cut experts gather and reduce-scatter unlike numbers of rows, as NCCL does.

    gloo takes equal ones alone.
    """
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_rows(x: Tensor, group: Any, sizes: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        if sizes is None or dist.get_world_size(group) == 1:
            return gather(x, group, sizes, *args, **kwargs)
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter_rows(x: Tensor, group: Any, sizes: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        if sizes is None or dist.get_world_size(group) == 1:
            return scatter(x, group, sizes, *args, **kwargs)
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total.split(sizes)[dist.get_rank(group)].contiguous()

    mappings._gather_along_first_dim = gather_rows
    mappings._reduce_scatter_along_first_dim = scatter_rows


class NoStream:
    """A stream or an event: everything can be called and entered, nothing happens."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _TorchOnCPU:
    """The `torch` module as the pipeline schedules see it: `zeros` of any device are on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """`torch.zeros`, on the CPU."""
        return torch.zeros(*size, device=_CPU, **kwargs)


def _manual_seed(seed: int) -> None:
    # Not `torch.manual_seed`: it seeds CUDA as well.
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(*_: Any, **__: Any) -> Tensor:
    return torch.get_rng_state()
