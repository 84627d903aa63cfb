#!/usr/bin/env python3
"""Profiles of machines that were not measured: a measured one, scaled by data-sheet numbers.

    python scripts/datasheet_profiles.py --out configs/hardware

    python scripts/datasheet_profiles.py --links-for one_gpu.json \
        --base configs/hardware/h200.json --out configs/hardware/h100.json

The first form writes all of them. Those of machines that were measured in one node get a network
from data sheets, and keep everything else. The second form gives a profile measured by one process,
which has no links, those of the base, where both machines have the same NVLink and switches;
`notes` says so.

GEMM and attention rates scale with the attainable rate of dense bf16, elementwise passes and
adapters with memory bandwidth; times of the host stay; what nano-batches hide is left out.
`attainable` is the share of the data sheet's peak that large GEMMs reach, from public measurements
of that generation. Network cards count at 80 % of their line rate: 4 nodes of 8 H100 with 8 cards
of 400 Gb/s (RoCE) reach 320 GB/s in a public all-reduce (github.com/NVIDIA/nccl/issues/1221), which
is 8 x 40. Well-tuned InfiniBand reaches more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
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
_BASE_LINK = 338.6e9
"""H200: measured NVLink 4, of 450 GB/s a direction."""
_LINE_SHARE, _NETWORK_LATENCY_S = 0.8, 3e-5
"""Share of a card's line rate that collectives attain, and the latency of a message."""
_ROWS = (128, 512, 1024, 2048, 8192, 16384)
_DATE = "2026-11-23"


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The network cards of a node."""

    nics_per_node: int
    nic_bytes_per_s: float
    """Line rate of a card in one direction."""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSheet:
    """The maker's figures of a machine."""

    name: str
    gpu: str
    flops_per_s: float
    """Dense bf16 with fp32 accumulation."""
    attainable: float
    bytes_per_s: float
    memory_bytes: float
    slower_kernels: float
    """Adapters' time beyond the bandwidth's: only Hopper runs the CUDA kernels, others Triton's."""
    gpus_per_node: int
    gpus_per_host: int | None = None
    link_bytes_per_s: float
    """One direction, as a ring all-reduce gets it."""
    network: Network | None
    has_fp8: bool = True
    more: str = ""
    """Sources and warnings, for the profile's notes."""


_CX7 = "8 ConnectX-7 of 400 Gb/s a node: DGX BasePOD reference architecture, core components"
NETWORKED = {
    "h100-infiniband": Network(nics_per_node=8, nic_bytes_per_s=50e9, source=_CX7),
    "h200-infiniband": Network(nics_per_node=8, nic_bytes_per_s=50e9, source=_CX7),
}
"""Networks of machines that were measured within one node."""

_UNKNOWN = (
    "unknown and not measured: rates of this project's Triton kernels (the CUDA kernels are "
    "Hopper's), of torch's attention and of FP8 products on sm_100; they are scaled like the rest, "
    "adapters 1.3 times slower"
)
_MATMUL = (
    "peaks, memory and its rate are also in github.com/stas00/ml-engineering, compute/accelerator; "
    "what is attained: h200.json's share by the matmul maxima there (MAMF: H200 794.5, B200 1745, "
    "GB200 1822 TFLOP/s)"
)
SHEETS = (
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
        network=Network(
            nics_per_node=8, nic_bytes_per_s=25e9, source="8 cards of 200 Gb/s a node: DGX A100"
        ),
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
        network=None,
    ),
    DataSheet(
        name="b200",
        gpu="NVIDIA B200",
        flops_per_s=2250e12,
        attainable=0.68,
        bytes_per_s=8.0e12,
        memory_bytes=191.5e9,
        slower_kernels=1.3,
        gpus_per_node=8,
        link_bytes_per_s=2 * _BASE_LINK,
        network=Network(nics_per_node=8, nic_bytes_per_s=50e9, source=_CX7),
        more=f"NVIDIA's DGX B200 page: 8 GPUs, 1,440 GB, 64 TB/s, NVLink 14.4 TB/s, 72 PFLOP/s of "
        f"FP8 with sparsity, a quarter of it dense bf16; 178.4 GiB as torch sees them "
        f"(newmind.ai/journal/18); {_MATMUL}; NVLink: twice h200.json's, as 1.8 TB/s to 0.9; "
        f"{_UNKNOWN}",
    ),
    DataSheet(
        name="gb200",
        gpu="NVIDIA GB200",
        flops_per_s=2500e12,
        attainable=0.64,
        bytes_per_s=8.0e12,
        memory_bytes=197.9e9,
        slower_kernels=1.3,
        gpus_per_node=72,
        gpus_per_host=4,
        link_bytes_per_s=2 * _BASE_LINK,
        network=Network(
            nics_per_node=72,
            nic_bytes_per_s=50e9,
            source="4 ConnectX-7 a tray of 4 GPUs (MLPerf Inference 6.1, system GB200-NVL72) of "
            "400 Gb/s each, their line rate",
        ),
        more=f"NVL72, one node is a rack of 18 trays; many sites schedule 16 of them (write "
        f"gpus_per_node 64 and nics_per_node 64 into a copy). NVIDIA's GB200 NVL72 page: 72 GPUs, "
        f"13.4 TB, 576 TB/s, NVLink 130 TB/s, 360 PFLOP/s of bf16 with sparsity, half of it dense; "
        f"memory: 186 GB by the H200's and B200's ratio of data sheet to torch; {_MATMUL}; NVLink: "
        f"twice h200.json's, 677 GB/s; a whole rack reached 835 to 847 GB/s in a public all-reduce "
        f"(github.com/coreweave/nccl-tests/pull/43), which may have summed in the switches; the "
        f"host's times are an x86 machine's, not Grace's; {_UNKNOWN}",
    ),
)


def scaled(base: HardwareProfile, sheet: DataSheet) -> HardwareProfile:
    """The base's profile as the other machine's numbers make it."""
    compute = sheet.flops_per_s * sheet.attainable / _BASE_FLOPS
    bandwidth = sheet.bytes_per_s / _BASE_BYTES
    known = sorted({point.rows for point in base.gemms})
    rows = {min(known, key=lambda value, row=row: abs(value - row)) for row in _ROWS}
    profile = replace(
        base,
        name=sheet.name,
        gpu=sheet.gpu,
        source="datasheet",
        date=_DATE,
        versions="",
        notes=f"not measured: {base.name}.json scaled by data-sheet numbers "
        f"({sheet.flops_per_s / 1e12:.4g} TFLOP/s, of which {sheet.attainable:.0%} are attained, "
        f"{sheet.bytes_per_s / 1e12:.3g} TB/s); scripts/datasheet_profiles.py"
        + (f"; {sheet.more}" if sheet.more else ""),
        memory_bytes=sheet.memory_bytes,
        copy_bytes_per_s=base.copy_bytes_per_s * bandwidth,
        stream_bytes_per_s=base.stream_bytes_per_s * bandwidth,
        gemms=_faster((point for point in base.gemms if point.rows in rows), compute),
        fp8_gemms=_faster(base.fp8_gemms if sheet.has_fp8 else (), compute),
        fp8_speedup=base.fp8_speedup if sheet.has_fp8 else None,
        attention=_faster(base.attention, compute),
        lora=_slower(base.lora, sheet.slower_kernels / bandwidth),
        gpus_per_node=sheet.gpus_per_node,
        gpus_per_host=sheet.gpus_per_host,
        intra_node=Link(bytes_per_s=sheet.link_bytes_per_s, latency_s=base.intra_node.latency_s),
        collectives=(),
        nano_overlap=0.0,
    )
    return profile if sheet.network is None else _connected(profile, sheet.network)


def with_network(measured: HardwareProfile, name: str, network: Network) -> HardwareProfile:
    """A machine that was measured in one node, with a network from data sheets."""
    within = f"all but the network is that of {measured.name}.json ({measured.versions})"
    notes = "; ".join(filter(None, (within, measured.notes, "scripts/datasheet_profiles.py")))
    profile = replace(measured, name=name, source="datasheet", date=_DATE, versions="", notes=notes)
    return _connected(profile, network)


def _connected(profile: HardwareProfile, network: Network) -> HardwareProfile:
    rate = _LINE_SHARE * network.nic_bytes_per_s
    return replace(
        profile,
        notes=f"{profile.notes}; network, not measured: {network.source}, of which "
        f"{_LINE_SHARE:.0%} are attained",
        inter_node=Link(bytes_per_s=rate, latency_s=_NETWORK_LATENCY_S),
        nics_per_node=network.nics_per_node,
    )


def all_profiles(base: HardwareProfile, folder: Path) -> Iterator[HardwareProfile]:
    """All profiles that are made of measured ones.

    Args:
        folder: where the measured ones lie that get a network.
    """
    for sheet in SHEETS:
        yield scaled(base, sheet)
    for name, network in NETWORKED.items():
        yield with_network(load_profile(folder / f"{name.split('-')[0]}.json"), name, network)


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
    parser.add_argument("--only", nargs="+", help="names of machines, instead of all")
    args = parser.parse_args()
    base = load_profile(args.base)
    if args.links_for is not None:
        profile = with_links(load_profile(args.links_for), base)
        args.out.write_text(profile_json(profile), encoding="utf-8")
        return 0
    for profile in all_profiles(base, args.base.parent):
        if args.only is None or profile.name in args.only:
            path = args.out / f"{profile.name}.json"
            path.write_text(profile_json(profile), encoding="utf-8")
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
