"""FlashAttention-4 for documents of a micro-batch, where `pip install '.[attention]'` brought it.

On an H200 it takes 0.6 of the time of torch's kernels for documents of 585 tokens in the mean and
half for one of 8,192, and its deterministic way back gives a document the same bits whatever is
packed beside it. A call costs the host 0.3 ms both ways instead of 0.06, so small micro-batches
stay with torch's kernels unless their bits must not depend on their size. `flash4_guard` keeps what
is not finite in its own document.

Kernels are compiled when they are first called, in about eight seconds, and kept in the cache
folder. `TLORA_ATTENTION=torch|flash4` forces one or the other.

Shapes: T query rows, K key rows, N query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.ops.kernel_build import cache_directory

logger = logging.getLogger(__name__)

PACKAGE, MODULE = "flash-attn-4", "flash_attn.cute"
VARIABLE = "TLORA_ATTENTION"
_HEAD_DIMS = (64, 96, 128)
"""Version 4.0.0b36 returns wrong values for 80, and says nothing."""
_MAJOR = 9
"""Hopper. Blackwell has other kernels, whose bits and reads behind documents nobody tried."""
_FEWEST_ROWS = 2048
"""Below, a round of an 8B model waits for the host, not for attention."""
_LONGEST = 129
"""No call says that its longest document is shorter: kernels would be compiled once more for it."""


def is_installed() -> bool:
    """Returns True if the package is there; imports nothing."""
    try:
        metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True


@contextmanager
def hidden() -> Iterator[None]:
    """Has others find the package missing.

    Megatron-core and Transformer Engine would import it with themselves, which takes seconds and
    starts CUDA: before `run.deterministic` has told cuBLAS what it needs, or in a process that is
    to fork.
    """
    if MODULE in sys.modules:
        yield
        return
    version_of = metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name == PACKAGE:
            raise metadata.PackageNotFoundError(distribution_name)
        return version_of(distribution_name)

    metadata.version = version
    sys.modules[MODULE] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        metadata.version = version_of
        del sys.modules[MODULE]


def keep_compiled() -> None:
    """Has compiled kernels kept in the cache folder.

    Call it before other threads start: libraries read the environment meanwhile.
    """
    if is_installed():
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        folder = str(cache_directory() / "flash_attention_4")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", folder)


def forced() -> str:
    """Returns what `TLORA_ATTENTION` names: `torch` or `flash4`; empty = neither.

    Raises:
        ValueError: if it names something else.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "torch", "flash4"):
        raise ValueError(f"{VARIABLE} must be torch or flash4, got {value!r}")
    return value


def used_on(device: torch.device) -> str | None:
    """Returns name and version of the package where it runs, None where torch's kernels do.

    Raises:
        ValueError: if `TLORA_ATTENTION` is invalid.
    """
    if forced() == "torch" or problem_of(device) is not None:
        return None
    return f"{PACKAGE} {metadata.distribution(PACKAGE).version}"


@functools.cache
def problem_of(device: torch.device) -> str | None:
    """Returns why it does not run on a device, None where it does."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major != _MAJOR:
        return f"compute capability must be {_MAJOR}.x, got {major}.{minor}"
    if not is_installed():
        return "flash-attn-4 is not installed; pip install '.[attention]'"
    try:
        load()
    except Exception as error:  # a broken installation raises anything
        logger.warning(f"torch's attention is used: flash-attn-4 cannot be imported ({error})")
        return f"flash-attn-4 cannot be imported: {error}"
    return None


@functools.cache
def load() -> Callable[..., Any]:
    """Imports the package and returns its attention of documents.

    It needs helpers of the package quack, whose own import would compile nothing we use and bring
    `torch._dynamo`, which takes longer than all the rest.
    """
    keep_compiled()
    spec = importlib.util.find_spec("quack")
    if spec is not None and "quack" not in sys.modules:
        sys.modules["quack"] = importlib.util.module_from_spec(spec)
        try:
            importlib.import_module("quack.dsl")
            from flash_attn.cute import flash_attn_varlen_func
        finally:
            del sys.modules["quack"]  # who imports it later gets all of it
    else:
        from flash_attn.cute import flash_attn_varlen_func
    warnings.filterwarnings("ignore", message="Argument aux_data")  # at each compilation
    return flash_attn_varlen_func


def takes(q_TND: Tensor, *, is_exact: bool) -> bool:
    """Returns True if queries get FlashAttention-4, given that flash attention takes them.

    Args:
        is_exact: a document's bits must not depend on the micro-batch that it is in.

    Raises:
        ValueError: if `TLORA_ATTENTION` is invalid, or says flash4 where that cannot run.
    """
    name, head_dim = forced(), q_TND.shape[-1]
    if name == "flash4":
        dims = ", ".join(map(str, _HEAD_DIMS))
        problem = problem_of(q_TND.device)
        if head_dim not in _HEAD_DIMS:
            problem = f"head dimensions must be one of {dims}, got {head_dim}"
        if problem:
            raise ValueError(
                f"{VARIABLE} must name attention that runs here, got flash4: {problem}"
            )
        return True
    if name or head_dim not in _HEAD_DIMS or not (is_exact or len(q_TND) >= _FEWEST_ROWS):
        return False
    return problem_of(q_TND.device) is None


def attend(
    q_TND: Tensor,
    k_KGD: Tensor,
    v_KGD: Tensor,
    begins: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
    window: int | None,
    sinks_N: Tensor | None,
    is_exact: bool,
) -> Tensor:
    """Returns attention `[T, N, D]`, differentiable; a document's last query sees its last key.

    Args:
        begins: of the documents' query and key rows, and the end of the last; int32.
        longest: rows of the longest document, of queries and of keys.
        window: keys that a query sees, its own included; None = all up to its own.
        is_exact: gradients have the same bits every time, and in any company.
    """
    # Not at the top: triton is only there on machines with a GPU.
    from tlora_megatron.ops.frozen.flash4_guard import guard_inputs, guard_output

    guard, q_TND, k_KGD, v_KGD = guard_inputs(q_TND, k_KGD, v_KGD, begins)
    found = load()(
        q_TND,
        k_KGD,
        v_KGD,
        cu_seqlens_q=begins[0],
        cu_seqlens_k=begins[1],
        max_seqlen_q=max(_LONGEST, longest[0]),
        max_seqlen_k=max(_LONGEST, longest[1]),
        softmax_scale=scale,
        causal=True,
        window_size=(None, None) if window is None else (window - 1, 0),
        learnable_sink=sinks_N,
        deterministic=is_exact or torch.are_deterministic_algorithms_enabled(),
    )
    return guard_output(guard, found[0] if isinstance(found, tuple) else found)
