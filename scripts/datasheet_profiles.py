#!/usr/bin/env python3
"""Profiles of machines that were not measured: a measured one, scaled by data-sheet numbers.

    python scripts/datasheet_profiles.py --base configs/hardware/h200.json \
        --out configs/hardware

    python scripts/datasheet_profiles.py --links-for one_gpu.json \
        --base configs/hardware/h200.json --out configs/hardware/h100.json

The second form gives a profile measured by one process, which has no links, those of the base,
where both machines have the same NVLink and switches; `notes` says so.

GEMM and attention rates scale with the attainable rate of dense bf16, elementwise passes and
adapters with memory bandwidth; times of the host stay; what nano-batches hide is left out.
`attainable` is the share of the data sheet's peak that large GEMMs reach, from public measurements
of that generation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tlora_megatron.cli.profile import profile_json
from tlora_megatron.planner.hardware import (
    AttentionPoint,
    GemmPoint,
    HardwareProfile,
    Link,
    LoraCost,
    load_profile,
)

Point = TypeVar("Point", GemmPoint, AttentionPoint)

_BASE_FLOPS, _BASE_BYTES = 0.70 * 989e12, 4.8e12
"""H200: data-sheet peak of dense bf16 times what it attains, and data-sheet bandwidth."""
_ROWS = (128, 512, 1024, 2048, 8192, 16384)
_DATE = "2026-11-21"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSheet:
    """What the maker says of a machine."""

    name: str
    gpu: str
    flops_per_s: float
    """Dense bf16 with fp32 accumulation."""
    attainable: float
    bytes_per_s: float
    memory_bytes: float
    slower_kernels: float
    """Adapters' time beyond the bandwidth's: GPUs before Hopper run the Triton kernels."""
    gpus_per_node: int
    link_bytes_per_s: float
    """One direction, as a ring all-reduce gets it."""
    network_bytes_per_s: float | None
    """A GPU's share of the node's network cards; None = one node."""
    has_fp8: bool = True


SHEETS = (
    DataSheet(
        name="h100",
        gpu="NVIDIA H100 80GB HBM3",
        flops_per_s=989e12,
        attainable=0.70,
        bytes_per_s=3.35e12,
        memory_bytes=85.0e9,
        slower_kernels=1.0,
        gpus_per_node=8,
        link_bytes_per_s=2.4e11,
        network_bytes_per_s=None,
    ),
    DataSheet(
        name="h100-infiniband",
        gpu="NVIDIA H100 80GB HBM3",
        flops_per_s=989e12,
        attainable=0.70,
        bytes_per_s=3.35e12,
        memory_bytes=85.0e9,
        slower_kernels=1.0,
        gpus_per_node=8,
        link_bytes_per_s=2.4e11,
        network_bytes_per_s=0.8 * 50e9,
    ),
    DataSheet(
        name="a100-80g",
        gpu="NVIDIA A100-SXM4-80GB",
        flops_per_s=312e12,
        attainable=0.80,
        bytes_per_s=2.04e12,
        memory_bytes=85.0e9,
        slower_kernels=1.3,
        gpus_per_node=8,
        link_bytes_per_s=1.8e11,
        network_bytes_per_s=0.8 * 25e9,
        has_fp8=False,
    ),
    DataSheet(
        name="l40s",
        gpu="NVIDIA L40S",
        flops_per_s=362e12,
        attainable=0.60,
        bytes_per_s=0.864e12,
        memory_bytes=47.6e9,
        slower_kernels=1.3,
        gpus_per_node=8,
        link_bytes_per_s=1.6e10,
        network_bytes_per_s=None,
    ),
)


def scaled(base: HardwareProfile, sheet: DataSheet) -> HardwareProfile:
    """The base's profile as the other machine's numbers make it."""
    compute = sheet.flops_per_s * sheet.attainable / _BASE_FLOPS
    bandwidth = sheet.bytes_per_s / _BASE_BYTES
    network = sheet.network_bytes_per_s
    known = sorted({point.rows for point in base.gemms})
    rows = {min(known, key=lambda value, row=row: abs(value - row)) for row in _ROWS}
    return replace(
        base,
        name=sheet.name,
        gpu=sheet.gpu,
        source="datasheet",
        date=_DATE,
        versions="",
        notes=f"not measured: {base.name}.json scaled by data-sheet numbers "
        f"({sheet.flops_per_s / 1e12:.4g} TFLOP/s, of which {sheet.attainable:.0%} are attained, "
        f"{sheet.bytes_per_s / 1e12:.3g} TB/s); scripts/datasheet_profiles.py",
        memory_bytes=sheet.memory_bytes,
        copy_bytes_per_s=base.copy_bytes_per_s * bandwidth,
        stream_bytes_per_s=base.stream_bytes_per_s * bandwidth,
        gemms=_faster((point for point in base.gemms if point.rows in rows), compute),
        fp8_gemms=_faster(base.fp8_gemms if sheet.has_fp8 else (), compute),
        fp8_speedup=base.fp8_speedup if sheet.has_fp8 else None,
        attention=_faster(base.attention, compute),
        lora=_slower(base.lora, sheet.slower_kernels / bandwidth),
        gpus_per_node=sheet.gpus_per_node,
        intra_node=Link(bytes_per_s=sheet.link_bytes_per_s, latency_s=base.intra_node.latency_s),
        inter_node=None if network is None else Link(bytes_per_s=network, latency_s=3e-5),
        collectives=(),
        nano_overlap=0.0,
    )


def _faster(points: Iterable[Point], factor: float) -> tuple[Point, ...]:
    """Points whose rates are those of a machine so many times as fast."""
    return tuple(
        replace(
            point,
            forward_flops_per_s=point.forward_flops_per_s * factor,
            backward_flops_per_s=point.backward_flops_per_s * factor,
        )
        for point in points
    )


def with_links(measured: HardwareProfile, base: HardwareProfile) -> HardwareProfile:
    """A profile of one GPU with the links of another machine."""
    links = f"links and collectives are those of {base.name}.json, not measured here"
    return replace(
        measured,
        notes="; ".join(
            [note for note in measured.notes.split("; ") if "link" not in note] + [links]
        ),
        gpus_per_node=base.gpus_per_node,
        intra_node=base.intra_node,
        inter_node=base.inter_node,
        collectives=base.collectives,
        stretch=base.stretch,
        overlap=base.overlap,
    )


def _slower(cost: LoraCost, factor: float) -> LoraCost:
    """All but the fixed costs, which are launches."""
    return LoraCost(
        **{
            name: getattr(cost, name) * (1.0 if "fixed" in name else factor)
            for name in LoraCost.__dataclass_fields__
        }
    )


def main() -> int:
    """Writes all of them, or links into one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=Path("configs/hardware/h200.json"))
    parser.add_argument("--out", type=Path, default=Path("configs/hardware"))
    parser.add_argument("--links-for", type=Path, help="a measured profile without links")
    parser.add_argument("--only", nargs="+", help="names of machines, where some are measured now")
    args = parser.parse_args()
    base = load_profile(args.base)
    if args.links_for is not None:
        profile = with_links(load_profile(args.links_for), base)
        args.out.write_text(profile_json(profile), encoding="utf-8")
        return 0
    for sheet in SHEETS:
        if args.only is None or sheet.name in args.only:
            path = args.out / f"{sheet.name}.json"
            path.write_text(profile_json(scaled(base, sheet)), encoding="utf-8")
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
