#!/usr/bin/env python3
"""Time of every kernel of the multi-adapter linear, beside the frozen linear's and the copy floor.

    python scripts/bench/kernel_profile.py [--tokens 8192] [--adapters 4] [--shapes 8b_o,8b_qkv]

Kernels are timed by the profiler on rotated buffers. `floor` is one pass over x and over dy at the
copy bandwidth measured in the same run: the least that s and dA, or dS with dB, can take.
"""

from __future__ import annotations

import argparse
import collections

import torch
from fused import FusedLinear, build_factors, row_groups, with_dropout
from linear_measure import linear_ops
from linear_shapes import SHAPES, adapter_mix
from linear_workload import Frozen, Provider, make_workload
from torch.profiler import ProfilerActivity, profile


def kernel_times(provider: Provider, sets: int, rounds: int = 6) -> dict[str, float]:
    """Microseconds a call of every kernel, by its short name."""

    def run() -> None:
        for index in range(sets):
            provider.backward(index, provider.forward(index))

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    a_call = len(events) // (sets * rounds)
    times: dict[str, float] = collections.defaultdict(float)
    for i, event in enumerate(events):
        times[f"{i % a_call} {_short(event.name)}"] += event.device_time / sets / rounds
    return dict(times)


def _short(name: str) -> str:
    for known in ("lora_gemm", "rank_rows", "rank_sums"):
        if known in name:
            return known
    return name.removeprefix("void ")[:40]


def copy_bandwidth() -> float:
    """Bytes a second of a large device-to-device copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    begin.record()
    for _ in range(5):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 5 * 2 * source.numel() / (begin.elapsed_time(end) / 1e3)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", default="8192")
    parser.add_argument("--adapters", default="4")
    parser.add_argument("--shapes", default="8b_qkv,8b_o,8b_gate_up,8b_down")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--kernels", default="cuda", choices=("cuda", "triton", "torch"))
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s")
    for tokens in map(int, arguments.tokens.split(",")):
        for name in arguments.shapes.split(","):
            shape = SHAPES[name]
            workload = make_workload(shape, tokens, device=device, dtype=torch.bfloat16)
            frozen = kernel_times(Frozen(workload), len(workload.sets))
            site = shape.site
            floors = [2e6 * tokens * n / bandwidth for n in (site.in_size, site.out_size)]
            print(f"\n{name} {tokens}: frozen {sum(frozen.values()):.0f} us", end="")
            print(f", floor of x {floors[0]:.0f} us, of dy {floors[1]:.0f} us")
            for adapters in map(int, arguments.adapters.split(",")):
                mix = adapter_mix(tokens, adapters)
                factors = with_dropout(build_factors(workload, mix), arguments.dropout)
                rows = row_groups(mix, dropout=arguments.dropout)
                ops = linear_ops(f"tlora_{arguments.kernels}", device, torch.bfloat16)
                times = kernel_times(
                    FusedLinear("x", ops, workload, factors, rows), len(workload.sets)
                )
                parts = ", ".join(f"{k} {v:.1f}" for k, v in times.items())
                ratio = sum(times.values()) / sum(frozen.values())
                print(f"  {adapters} adapters {sum(times.values()):.0f} us ({ratio:.3f}): {parts}")


if __name__ == "__main__":
    main()
