"""Runs Megatron-LM's trainer where there is no GPU, to try a command before it meets one.

The trainer assumes CUDA in more places than Megatron-core's models do
(`integrations.megatron.cpu`). `install` replaces them in this process; the checkout stays as it is.
Models of the local layer spec run, in every layout of one machine, over gloo. Nothing is fast here,
and what needs CUDA kernels (Transformer Engine, FP8, CUDA graphs) does not run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tlora_megatron.integrations.megatron import cpu
from tlora_megatron.integrations.megatron_lm.guard import check_trainer

FLAGS = (
    *("--transformer-impl", "local", "--distributed-backend", "gloo"),
    *("--no-masked-softmax-fusion", "--no-gradient-accumulation-fusion", "--no-bias-swiglu-fusion"),
    *("--no-rope-fusion", "--no-persist-layer-norm"),
)
"""Megatron's own switches for running without CUDA, Transformer Engine and apex."""

_CPU = torch.device("cpu")
_NOT_NEEDED = ("set_device", "empty_cache", "set_stream", "reset_peak_memory_stats")
_NO_BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_installed = False


def install() -> None:
    """Makes `megatron.core` and `megatron.training` run on the CPU; a second call does nothing.

    Raises:
        ImportError: if no Megatron-LM that fits can be imported.
    """
    global _installed
    if _installed:
        return
    _installed = True
    # A GPU that is there must look as if it were not.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # triton of PyPI makes inductor look for a GPU.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    check_trainer()
    cpu.install()
    cpu.install_dispatchers()
    _replace_cuda()
    _load_dataset_helpers()
    _replace_trainer()
    CudaIsCpu().__enter__()


class CudaIsCpu(TorchFunctionMode):
    """`device="cuda"` is the CPU, `.cuda()` the tensor itself, `Tensor.type()` says CUDA.

    Megatron's optimizers compare type names.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls the function with every CUDA device replaced."""
        kwargs = dict(kwargs or {})
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def _replace_cuda() -> None:
    cuda: Any = torch.cuda
    for name in _NOT_NEEDED:
        # One function a name: dynamo's table of rules refuses one object under two.
        setattr(cuda, name, lambda *_, **__: None)
    for name in _NO_BYTES:
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.memory_stats = lambda *_, **__: {}
    cuda.device_count = lambda: 1
    cuda.default_stream = lambda *_, **__: cpu.NoStream()
    properties = types.SimpleNamespace(
        major=0, minor=0, name="cpu", total_memory=0, multi_processor_count=1
    )
    cuda.get_device_properties = lambda *_, **__: properties
    cuda.get_device_capability = lambda *_, **__: (0, 0)
    join = dist.init_process_group
    dist.init_process_group = lambda *args, **kwargs: join(
        *args, **{key: value for key, value in kwargs.items() if key != "device_id"}
    )


def _load_dataset_helpers() -> None:
    """Takes the compiled helpers of an installed megatron-core for those of the checkout.

    Only pre-training data need them: without an installed one they are left out.
    """
    name = "megatron.core.datasets.helpers_cpp"
    pattern = "megatron/core/datasets/helpers_cpp*.so"
    file = next((file for folder in sys.path for file in Path(folder).glob(pattern)), None)
    if file is None:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _replace_trainer() -> None:
    schedules: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    initialize: Any = importlib.import_module("megatron.training.initialize")
    training: Any = importlib.import_module("megatron.training.training")
    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )
    initialize._compile_dependencies = lambda *_: None
    # gloo's asynchronous send would read the freed storage.
    schedules.deallocate_output_tensor = lambda *_, **__: None
    # Megatron's own takes outputs whose storage is freed, and no others.
    schedules.custom_backward = torch.autograd.backward
