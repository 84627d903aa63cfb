"""The kernels of one iteration, by kind and by name."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

KINDS = (
    ("FP8 GEMM, its rank part inside", r"fp8_gemm|fp8_dgrad|^_product_kernel"),
    ("FP8 codes of rows", r"^_encode_kernel"),
    ("FP8 codes of W transposed", r"^_transpose_kernel"),
    ("rank-extended GEMM, rows and sums of ranks", r"lora_gemm|rank_rows|rank_sums"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("our norm and SwiGLU", r"^_(forward|backward)_kernel"),
    ("cross-entropy", r"cross_entropy|softmax|_statistics_kernel|_gradient_kernel"),
    ("norm", r"rms_?norm|layer_?norm"),
    ("SwiGLU", r"swiglu|silu"),
    ("rotation, sorting of heads", r"rotate|rope|rotary"),
    ("quantisation", r"quantize|cast_transpose|amax"),
    ("GEMM", r"gemm|cutlass|nvjet|cublas|sm90_xmma"),
    ("collective", r"nccl"),
    ("optimizer", r"adam"),
    ("copy, fill", r"memcpy|memset|copy|fill|cat|index"),
    ("elementwise, reduction", r"elementwise|reduce|vectorized|triton_"),
)
"""A kernel is of the first kind whose pattern its name matches."""
_SHOWN = 40


def kernel_table(run: Callable[[], object], title: str, file: Path) -> None:
    """Appends what a call launches on the device, its sums first, to a file."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        run()
        torch.cuda.synchronize()
    on_device = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end) for event in on_device]
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    kernels = []
    for event in trace.key_averages():
        spent_us = event.self_device_time_total
        if not spent_us:
            continue
        kernels.append((spent_us, event.count, event.key))
        total = totals[kind_of(event.key)]
        total[0] += spent_us
        total[1] += event.count
    spent_ms = sum(k[0] for k in kernels) / 1e3
    lines = [f"== {title}: {spent_ms:.1f} ms on the device, {idle_us(spans) / 1e3:.1f} ms idle"]
    for kind, (spent_us, count) in sorted(totals.items(), key=lambda item: -item[1][0]):
        lines.append(f"{spent_us / 1e3:9.2f} ms {count:6.0f}  {kind}")
    lines.append("-- by name")
    for spent_us, count, name in sorted(kernels, reverse=True)[:_SHOWN]:
        lines.append(f"{spent_us / 1e3:9.2f} ms {count:6d}  {name[:150]}")
    with file.open("a") as sink:
        sink.write("\n".join(lines) + "\n\n")


def idle_us(spans: Sequence[tuple[float, float]]) -> float:
    """Time between the first span's begin and the last one's end in which none runs."""
    ends = itertools.accumulate((end for _, end in sorted(spans)), max)
    begins = (begin for begin, _ in sorted(spans)[1:])
    return sum(max(0.0, begin - end) for end, begin in zip(ends, begins, strict=False))


def kind_of(name: str) -> str:
    found = (kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))
    return next(found, "other")
