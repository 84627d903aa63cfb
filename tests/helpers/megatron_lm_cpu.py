"""Runs a script of a Megatron-LM checkout without CUDA: `megatron_lm_cpu.py SCRIPT ARGS`.

The trainer assumes CUDA in more places than the package has to answer for; what
`integrations/megatron/cpu.py` does not cover is replaced here, for tests alone. The checkout is
named by MEGATRON_LM_PATH. `TLORA_PLAIN=1` runs the script as `python SCRIPT` would, with no hook;
`TLORA_KILL_AT=N` kills the processes when the trainer is about to take its N-th iteration;
`TLORA_WEIGHTS=1` draws weights that depend on their names and shapes only.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import runpy
import signal
import sys
import types
import typing
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _CudaIsCpu(TorchFunctionMode):
    """`device="cuda"` is the CPU, `.cuda()` the tensor itself, `Tensor.type()` says CUDA.

    Megatron's optimizers compare type names.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Nothing:
    """A stream or an event: everything can be called and entered, nothing happens."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def install() -> None:
    """Makes `megatron.core` and `megatron.training` run on the CPU, in this process."""
    if not hasattr(typing, "override"):  # from Python 3.12 on, which main asks for
        typing.override = lambda method: method
    # triton of PyPI makes inductor look for a GPU.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from tlora_megatron.integrations.megatron import cpu

    cpu.install()
    _replace_cuda()
    _load_dataset_helpers()
    _replace_trainer()
    _CudaIsCpu().__enter__()


def _replace_cuda() -> None:
    cuda: Any = torch.cuda
    for name in ("set_device", "empty_cache", "set_stream", "reset_peak_memory_stats"):
        # One function a name: dynamo's table of rules refuses one object under two.
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.max_memory_reserved = lambda *_, **__: 0
    cuda.memory_stats = lambda *_, **__: {}
    cuda.device_count = lambda: 1
    cuda.Stream = cuda.Event = cuda.stream = _Nothing
    cuda.current_stream = lambda *_, **__: _Nothing()
    cuda.default_stream = lambda *_, **__: _Nothing()
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
    """The compiled helpers of the installed megatron-core stand for those of the checkout."""
    name = "megatron.core.datasets.helpers_cpp"
    found = (
        file
        for folder in sys.path
        for file in Path(folder).glob("megatron/core/datasets/helpers_cpp*.so")
    )
    spec = importlib.util.spec_from_file_location(name, next(found))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _replace_trainer() -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.moe import moe_utils
    from megatron.training import initialize, training

    # 0.16 asks for the name without defining it where Transformer Engine is missing.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )
    initialize._compile_dependencies = lambda *_: None
    # gloo's asynchronous send would read the freed storage.
    schedules.deallocate_output_tensor = lambda *_, **__: None
    schedules.custom_backward = _backward
    if os.environ.get("TLORA_WEIGHTS"):
        build = _with_named_weights(training.setup_model_and_optimizer)
        training.setup_model_and_optimizer = build
    if kill_at := int(os.environ.get("TLORA_KILL_AT") or 0):
        training.train_step = _until(kill_at, training.train_step)


def _backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Megatron's own takes outputs whose storage is freed, and no others."""
    torch.autograd.backward(output, grad_output)


def _with_named_weights(set_up: Any) -> Any:
    @functools.wraps(set_up)
    def build(*args: Any, **kwargs: Any) -> Any:
        result = set_up(*args, **kwargs)
        with torch.no_grad():
            for name, weight in (pair for chunk in result[0] for pair in chunk.named_parameters()):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                noise = torch.randn(weight.shape, generator=generator) * 0.1
                weight.copy_(noise + 1.0 if weight.dim() == 1 else noise)
        return result

    return build


def _until(count: int, train_step: Any) -> Any:
    calls = itertools.count(1)

    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(*args, **kwargs)

    return step


def main() -> None:
    """Runs the script of the command line."""
    checkout, script = os.environ["MEGATRON_LM_PATH"], sys.argv[1]
    sys.path.insert(0, checkout)
    install()
    if os.environ.get("TLORA_PLAIN"):
        sys.argv = sys.argv[1:]
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
    else:
        from tlora_megatron.launch import main as launch

        launch(sys.argv[1:])


if __name__ == "__main__":
    main()
