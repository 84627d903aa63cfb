#!/usr/bin/env python3
"""Times the multi-adapter AdamW against torch's fused AdamW, a call an adapter, on one GPU.

Prints one row a workload and provider: milliseconds (median), GB/s over the 32 bytes that an
element costs, launches' host time. Refuses to time what differs from torch.

usage: adamw.py [--repeats N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

from tlora_megatron.ops.adamw.step import AdamUpdate, fused_adamw
from tlora_megatron.ops.lora.kernel_choice import VARIABLE

GPU = torch.device("cuda")
WORKLOADS = {
    "1 of rank 16": [41_943_040],
    "8 of ranks 4-64": [rank * 2_621_440 for rank in (4, 8, 8, 16, 16, 32, 32, 64)],
    "64 of rank 8": [20_971_520] * 64,
    "64 small": [1_000_003 + 1000 * i for i in range(64)],
}
_BYTES = 32
"""Gradient, weight and both moments in fp32, each read and written."""


def make_updates(sizes: list[int]) -> list[AdamUpdate]:
    """Updates with settings of their own and a clip factor on the device."""
    clips = torch.full((len(sizes),), 0.5, device=GPU)
    return [
        AdamUpdate(
            master=torch.randn(size, device=GPU),
            grad=torch.randn(size, device=GPU),
            exp_avg=torch.randn(size, device=GPU),
            exp_avg_sq=torch.rand(size, device=GPU),
            lr=1e-4 * (i + 1),
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.01,
            step=3 + i,
            clip=clips[i],
        )
        for i, size in enumerate(sizes)
    ]


def check() -> None:
    """Exits where the kernel's weights differ from torch's by more than rounding."""
    results = []
    for provider in ("torch", "triton"):
        os.environ[VARIABLE] = provider
        torch.manual_seed(0)
        updates = make_updates([5_000, 1_000_003])
        fused_adamw(updates)
        results.append([update.master for update in updates])
    for left, right in zip(*results, strict=True):
        error = (left - right).abs().max().item()
        if error > 1e-6:
            sys.exit(f"the kernel must give torch's weights, got a difference of {error:g}")


def time_ms(run: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median milliseconds of a call on the device and on the host."""
    on_device, on_host = [], []
    for repeat in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        started = time.perf_counter()
        run()
        host = time.perf_counter() - started
        end.record()
        end.synchronize()
        if repeat >= 3:
            on_device.append(begin.elapsed_time(end))
            on_host.append(1e3 * host)
    return statistics.median(on_device), statistics.median(on_host)


def main() -> None:
    """Checks, then times every workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="timed calls (default 20)")
    args = parser.parse_args()
    check()
    print("workload,provider,device_ms,gb_per_s,host_ms,gpu")
    for name, sizes in WORKLOADS.items():
        updates = make_updates(sizes)
        for provider in ("torch", "triton"):
            os.environ[VARIABLE] = provider
            device_ms, host_ms = time_ms(lambda u=updates: fused_adamw(u), args.repeats)
            rate = _BYTES * sum(sizes) / device_ms / 1e6
            gpu = torch.cuda.get_device_name()
            print(f"{name},{provider},{device_ms:.3f},{rate:.0f},{host_ms:.3f},{gpu}", flush=True)
        del updates
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
