"""`tlora inspect kernels`: shows which kernels train here, why, and what faster ones need."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any, get_args

import torch
from rich.console import Console

from tlora_megatron.ops.frozen import flash4
from tlora_megatron.ops.kernel_build import built_library, cache_directory, find_compiler
from tlora_megatron.ops.lora.kernel_choice import (
    VARIABLE,
    Kernels,
    forced_kernels,
    kernel_choice,
    problem_of,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def describe_kernels() -> dict[str, Any]:
    """Describes the kernels of this machine; builds the CUDA extension if it would be used."""
    return {
        "forced": forced_kernels(),
        "devices": [_device(device, count) for device, count in _kinds_of_devices()],
        "versions": {name: _version(name) for name in ("torch", "triton")},
        "compiler": find_compiler(),
        "cache_directory": str(cache_directory()),
        "library": str(built_library()) if built_library().exists() else None,
    }


def print_kernels(console: Console, description: dict[str, Any]) -> None:
    """Prints the result of `describe_kernels`, one fact per line."""
    for device in description["devices"]:
        count = f"{device['count']} x " if device["count"] > 1 else ""
        capability = device["compute_capability"]
        detail = f", compute capability {capability}" if capability else ""
        console.print(f"{count}{device['name']}{detail}", style="bold")
        for choice in device["kernels"]:
            name, style = choice["name"] or "none", "" if choice["name"] else "red"
            console.print(f"  {choice['dtype']}: {name} ({choice['reason']})", style=style)
            for faster in choice["faster"]:
                console.print(f"    not {faster['name']}: {faster['problem']}", style="dim")
        console.print(f"  attention: {device['attention']}")
    versions = description["versions"].items()
    console.print("versions: " + ", ".join(f"{name} {value or '-'}" for name, value in versions))
    console.print(f"CUDA compiler: {description['compiler'] or '-'}")
    built = description["library"] or f"none in {description['cache_directory']}"
    console.print(f"built CUDA kernels: {built}")


def _kinds_of_devices() -> list[tuple[torch.device, int]]:
    """The first GPU of each name with the number of such GPUs; the CPU without GPUs."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    kinds = [
        (torch.device("cuda", names.index(name)), names.count(name))
        for name in dict.fromkeys(names)
    ]
    return kinds or [(torch.device("cpu"), 1)]


def _device(device: torch.device, count: int) -> dict[str, Any]:
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else f"CPU ({platform.machine()})"
    capability = torch.cuda.get_device_capability(device) if is_gpu else None
    why_torch = flash4.problem_of(device) or f"{flash4.VARIABLE}=torch"
    return {
        "name": name,
        "count": count,
        "compute_capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "kernels": [_choice(device, dtype) for dtype in DTYPES],
        "attention": flash4.used_on(device) or f"torch (not flash-attn-4: {why_torch})",
    }


def _choice(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The choice for a dtype; its name is None if the forced kernels cannot run with it."""
    name: Kernels | None
    try:
        name, reason = kernel_choice(device, dtype)
    except ValueError as error:
        name, reason = None, str(error)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "name": name,
        "reason": reason,
        "faster": _faster(name, device, dtype) if name else [],
    }


def _faster(name: Kernels, device: torch.device, dtype: torch.dtype) -> list[dict[str, str]]:
    order: Sequence[Kernels] = get_args(Kernels)
    return [
        {
            "name": faster,
            "problem": problem_of(faster, device, dtype) or f"it runs here, unset {VARIABLE}",
        }
        for faster in order[order.index(name) + 1 :]
    ]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
