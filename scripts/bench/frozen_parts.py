#!/usr/bin/env python3
"""Times the frozen backbone's parts that are not GEMMs, on Llama-3.1-8B's shapes.

    python scripts/bench/frozen_parts.py --json frozen_parts.json
    python scripts/bench/frozen_parts.py --parts norm head --tokens 2048

Parts: `norm` (residual sum and RMSNorm), `swiglu`, `heads` (queries, keys and values out of the
fused projection, rotated), `attention` for several mixes of lengths, `head` (output layer and loss)
with all and half of the rows being targets. Each provider of a part is first checked against fp32,
outputs and gradients; then forward, and forward with backward, run in turn as CUDA graphs. `floor`
is the part's reads and writes at the bandwidth of a copy of the same run. The last line is a whole
decoder layer without adapters: time on the GPU, time to launch it, and its GEMMs alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from frozen_providers import PARTS, Case, Provider
from timing import Replay, Sample, time_interleaved, warm_up

from tlora_megatron.integrations.megatron import model as backbone
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.ops.routing.segments import Document, pack_micro_batch, use_micro_batch

TOLERANCE = 2e-2
"""Largest error over the largest value, against fp32: bf16 rounded a few times."""


class Row(NamedTuple):
    """One provider of one part."""

    part: str
    provider: str
    forward_us: float
    backward_us: float
    floor_us: float
    error: float


def copy_bytes_per_s(device: torch.device) -> float:
    """Bandwidth of a copy, read and written bytes counted."""
    source = torch.empty(2**29, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    sample = _times([lambda: target.copy_(source)], device)[0]
    return 2 * source.numel() / sample.median_us * 1e6


def _times(calls: list[Callable[[], object]], device: torch.device) -> list[Sample]:
    for call in calls:
        warm_up(call, device)
    return time_interleaved([Replay([call], device) for call in calls], device)


def measure(case: Case, device: torch.device, bytes_per_s: float) -> list[Row]:
    """Checks all providers of a part and times them in turn."""
    errors = {p.name: _error_or_reason(case, p) for p in case.providers}
    providers = [p for p in case.providers if isinstance(errors[p.name], float)]
    calls: list[Callable[[], object]] = []
    for provider in providers:
        forward, both = _calls(case, provider)
        calls += [forward, both]
    samples = _times(calls, device)
    floor_us = case.moved_bytes / bytes_per_s * 1e6
    rows = []
    for index, provider in enumerate(providers):
        forward_us, both_us = (s.median_us for s in samples[2 * index : 2 * index + 2])
        error = float(errors[provider.name])
        rows.append(
            Row(case.name, provider.name, forward_us, both_us - forward_us, floor_us, error)
        )
    return rows


def _error_or_reason(case: Case, provider: Provider) -> float | str:
    """A baseline that cannot run here is left out with its reason; ours must run."""
    try:
        return _error(case, provider)
    except (RuntimeError, ValueError, TypeError) as error:
        if provider.name.startswith("tlora"):
            raise
        print(f"{case.name:22} {provider.name:20} left out: {error}")
        return str(error)


def _calls(case: Case, provider: Provider) -> tuple[Callable[[], object], Callable[[], object]]:
    leaves = [t.detach().requires_grad_() for t in case.inputs]

    def forward() -> object:
        return provider.run(*leaves)

    def both() -> object:
        outputs = provider.run(*leaves)
        return torch.autograd.grad(outputs, leaves, case.upstream(outputs))

    return forward, both


def _error(case: Case, provider: Provider) -> float:
    """Largest relative error of any output or gradient."""
    actual = _results(case, provider.run, torch.bfloat16)
    expected = _results(case, case.reference, torch.float32)
    worst = 0.0
    for got, value in zip(actual, expected, strict=True):
        difference = (got.float() - value).abs().max() / value.abs().max()
        worst = max(worst, difference.item())
    return worst if worst == worst else float("inf")


def _results(case: Case, run: Callable[..., Any], dtype: torch.dtype) -> list[torch.Tensor]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in case.inputs]
    outputs = run(*leaves)
    grads = torch.autograd.grad(outputs, leaves, case.upstream(outputs))
    return [t.detach() for t in (*outputs, *grads)]


def measure_layer(model_path: str, tokens: int, device: torch.device) -> dict[str, float]:
    """GPU and host time of one frozen decoder layer, and of its GEMMs alone, in microseconds."""
    spec = read_model_spec(Path(model_path))
    spec = dataclasses.replace(spec, num_layers=1, vocab_size=1024)
    layout = ParallelLayout()
    backbone.initialize_parallel(layout)
    model = backbone.build_backbone(spec, layout, dtype=torch.bfloat16)
    backbone.load_backbone(model, spec, None, layout)
    lengths = [tokens // 8] * 8
    view = pack_micro_batch(
        [Document(slot=0, length=n) for n in lengths], num_slots=0, num_tokens=tokens
    )
    x = torch.randn(tokens, 1, spec.hidden_size, device=device, dtype=torch.bfloat16)
    x.requires_grad_()
    dy = torch.randn_like(x)
    layer = model.decoder.layers[0]
    host: list[float] = []

    def both() -> None:
        begin = time.perf_counter()
        with use_micro_batch(view):
            out, _ = layer(x)
        torch.autograd.grad(out, x, dy)
        host.append(time.perf_counter() - begin)

    def gemms() -> None:
        for weight in weights:
            y = torch.mm(inputs[weight.shape[1]], weight.t())
            torch.mm(y, weight)

    weights = [p.detach() for p in layer.parameters() if p.dim() == 2]
    inputs = {
        w.shape[1]: torch.randn(tokens, w.shape[1], device=device, dtype=torch.bfloat16)
        for w in weights
    }
    layer_us, gemm_us = (s.median_us for s in _times([both, gemms], device))
    host.clear()
    for _ in range(10):
        both()
    torch.cuda.synchronize()
    launch_us = sorted(host)[len(host) // 2] * 1e6
    return {"layer_us": layer_us, "gemm_us": gemm_us, "launch_us": launch_us}


def main() -> int:
    """Measures, prints tables, returns 1 if a provider's results are off."""
    args = _arguments()
    device = torch.device("cuda")
    torch.cuda.set_device(0)
    bytes_per_s = copy_bytes_per_s(device)
    print(f"{torch.cuda.get_device_name()}, copy {bytes_per_s / 1e12:.2f} TB/s")
    rows: list[Row] = []
    for part in args.parts:
        for case in PARTS[part](args.tokens, device):
            measured = measure(case, device, bytes_per_s)
            _print(measured)
            rows += measured
            torch.cuda.empty_cache()
    layer = None
    if not args.no_layer:
        layer = measure_layer(args.model, args.tokens, device)
        print({key: round(value, 1) for key, value in layer.items()})
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"rows": [r._asdict() for r in rows], "layer": layer}, file, indent=1)
    wrong = [row for row in rows if row.error > TOLERANCE]
    for row in wrong:
        print(f"WRONG {row.part} {row.provider}: error {row.error:.3g}")
    return bool(wrong)


def _print(rows: list[Row]) -> None:
    for row in rows:
        total = row.forward_us + row.backward_us
        print(
            f"{row.part:22} {row.provider:20} forward {row.forward_us:9.1f}  "
            f"backward {row.backward_us:9.1f}  both {total:9.1f} us  "
            f"floor {row.floor_us:8.1f}  error {row.error:.1e}",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--model", default="configs/models/llama-3.1-8b.json")
    parser.add_argument("--no-layer", action="store_true", help="leave the whole layer out")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
