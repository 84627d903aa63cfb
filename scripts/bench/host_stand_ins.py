"""Stand-ins that start no kernel, so that the host's work for a GPU can be timed without one."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tlora_megatron.ops import extension
from tlora_megatron.ops.frozen import (
    packed_attention,
    qkv_rotary,
    rms_norm,
    swiglu,
    varlen_attention,
)
from tlora_megatron.ops.lora import kernel_choice
from tlora_megatron.ops.lora.cuda import calls as cuda_calls
from tlora_megatron.ops.lora.cuda import ops as cuda_ops

_MULTIPROCESSORS = 132


def without_gpu() -> None:
    """Makes CPU tensors take the way of an H100's, to where kernels would start."""
    _replace_library()
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    stream = SimpleNamespace(cuda_stream=0)
    torch.cuda.current_stream = lambda device=None: stream  # type: ignore[assignment]
    for frozen in (rms_norm, swiglu, qkv_rotary):
        frozen.runs_triton = lambda x: True  # type: ignore[attr-defined]
    driver.set_active(_Driver())
    torch.matmul = torch.Tensor.matmul = _matmul  # type: ignore[assignment]
    packed_attention.runs_flash = lambda q_TND: True  # type: ignore[assignment]
    varlen_attention.torch = _TorchWithFlash()  # type: ignore[assignment]
    kernel_choice._automatic = lambda device, dtype: kernel_choice.KernelChoice("cuda", "a bench")


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def without_ranks(size: int) -> None:
    """A world of so many processes, the first of which this is: collectives do nothing."""
    os.environ |= {"WORLD_SIZE": str(size), "RANK": "0", "LOCAL_RANK": "0"}
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    new_group = dist.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs | {"backend": "fake", "pg_options": None})

    dist.new_group = new_fake_group


def _replace_library() -> None:
    """A library whose functions return 0: glibc compares the addresses of struct and stream."""
    nothing = ctypes.CDLL(None).pthread_equal
    library = extension.Extension.__new__(extension.Extension)
    library._functions = {}
    library._library = SimpleNamespace(  # type: ignore[assignment]
        **{f"tlora_{name}": nothing for name in ("gemm", "rows", "sums")}
    )
    cuda_calls.load_extension = lambda: library  # type: ignore[assignment]
    cuda_calls.device_index = lambda x: 0
    for module in (cuda_calls, cuda_ops):
        module.multiprocessors = lambda device: _MULTIPROCESSORS  # type: ignore[attr-defined]


class _Driver:
    """Triton's view of an H100 that loads and launches nothing; kernels are compiled for it."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda *_: (object(), 0, 32, 0, 1024),
        )
        self.launcher_cls = lambda source, metadata: _launch
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0

    def get_current_target(self) -> GPUTarget:
        """An H100."""
        return GPUTarget("cuda", 90, 32)


def _launch(*args: Any) -> None:
    del args


class _TorchWithFlash:
    """Stands in for `torch` in `ops.frozen.varlen_attention`: attention returns new memory."""

    def __init__(self) -> None:
        self.ops = SimpleNamespace(
            aten=SimpleNamespace(
                _flash_attention_forward=_flash_forward, _flash_attention_backward=_flash_backward
            )
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _flash_forward(q_TND: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    lse = q_TND.new_empty(q_TND.shape[1], len(q_TND), dtype=torch.float32)
    seed = torch.empty(2, dtype=torch.int64)
    return torch.empty_like(q_TND), lse, seed, seed, seed


def _flash_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
