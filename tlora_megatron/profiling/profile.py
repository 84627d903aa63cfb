"""Measures a machine for `tlora profile`; every process of the world takes part."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.planner.hardware import (
    FP8_SPEEDUP,
    CollectivePoint,
    GemmPoint,
    HardwareProfile,
    HostCost,
    Link,
    LoraCost,
)
from tlora_megatron.profiling.ops import (
    LoraSample,
    copy_bytes_per_s,
    measure_attention,
    measure_fp8_gemm,
    measure_gemm,
    measure_lora,
    multiplies_fp8,
)
from tlora_megatron.profiling.sizes import ProfileSizes
from tlora_megatron.profiling.synthetic_run import measure_layers, measure_stretch
from tlora_megatron.profiling.timer import OPS, CollectiveTimer, DeviceTimer, fit_link

_SWEEPS = 2000


def fit_lora(samples: Sequence[LoraSample]) -> tuple[LoraCost, float]:
    """Fits the coefficients; returns them with the median relative error of the linear's time.

    Errors are relative to the linear's time, so that small linears count as much as large ones.
    """
    if not samples:
        raise ValueError("samples must hold at least one, got none")
    table = np.array(samples, dtype=np.float64)
    forward_s, backward_s, frozen_s, inputs, outputs, rank_n, rank_k, grads, dropped = table.T
    ones = np.ones_like(inputs)
    there = np.stack([ones, inputs, rank_n, grads, dropped], axis=1)
    back = np.stack([ones, 2 * outputs + inputs, rank_k, grads, dropped], axis=1)
    forward = non_negative_fit(there, forward_s, 1 / frozen_s)
    backward = non_negative_fit(back, backward_s, 1 / frozen_s)
    measured = frozen_s + forward_s + backward_s
    predicted = frozen_s + there @ forward + back @ backward
    names = ("fixed", "input", "rank", "factor", "dropout")
    cost = {f"forward_{n}_s": float(c) for n, c in zip(names, forward, strict=True)}
    names = ("fixed", "stream", "rank", "factor", "dropout")
    cost |= {f"backward_{n}_s": float(c) for n, c in zip(names, backward, strict=True)}
    return LoraCost(**cost), float(np.median(np.abs(predicted / measured - 1)))


def non_negative_fit(features: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Non-negative coefficients `[features]` with the least weighted squared error.

    Coordinate descent, which converges since the problem is convex.

    Args:
        features: `[samples, features]`.
        values: `[samples]`.
        weights: `[samples]`, on the errors.
    """
    x = features * weights[:, None]
    y = values * weights
    scale = np.linalg.norm(x, axis=0)
    scale[scale == 0] = 1.0
    x = x / scale
    gram, target = x.T @ x, x.T @ y
    found = np.zeros(x.shape[1])
    for _ in range(_SWEEPS):
        for j in range(len(found)):
            if gram[j, j] > 0:
                step = (target[j] - gram[j] @ found) / gram[j, j]
                found[j] = max(0.0, found[j] + step)
    return found / scale


T = TypeVar("T")

_SHARES = {"gemms": 0.35, "lora": 0.3, "collectives": 0.2}
"""Share of the budget for each stage; the other stages are short and always run to their end."""
_RESERVED_BYTES = 1e9
"""Memory of driver and libraries if the device does not tell."""
_WARM_GEMM, _WARM_TURNS = 8192, 1000
"""About 1.6 s on an H100."""
_OVERLAP_BYTES, _OVERLAP_GEMM = 2**26, 6144


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRequest:
    name: str
    sizes: ProfileSizes
    budget_s: float
    gpus_per_node: int | None = None
    """GPUs that the link connects; None: this node's processes, or its GPUs if they are more."""
    on_stage: Callable[[str, float], None] = lambda stage, done: None
    """Called with each stage's name and the share of all work that is done, 0 to 1."""


def measure_profile(request: ProfileRequest) -> HardwareProfile:
    """Measures everything on this process's device and, with several processes, their links.

    Raises:
        ValueError: if the budget is not positive, or processes are spread over nodes.
    """
    if request.budget_s <= 0:
        raise ValueError(f"budget_s must be above 0, got {request.budget_s}")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))) != world_size:
        raise ValueError(
            f"processes must be on one node, got {world_size} on several; "
            f"write inter_node and nics_per_node into the profile by hand"
        )
    return _Measurement(request, world_size).run()


class _Measurement:
    """One run through all stages."""

    def __init__(self, request: ProfileRequest, world_size: int) -> None:
        from tlora_megatron.integrations.megatron.process_groups import initialize_parallel

        initialize_parallel(ParallelLayout(dp_size=world_size))
        self.request = request
        self.sizes = request.sizes
        self.world_size = world_size
        on_gpu = torch.cuda.is_available()
        index = torch.cuda.current_device() if on_gpu else 0
        self.device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.timer = DeviceTimer(self.device)
        self.notes: list[str] = []

    def run(self) -> HardwareProfile:
        on_stage = self.request.on_stage
        on_stage("copy", 0.0)
        self._warm_up()
        copy = copy_bytes_per_s(self.timer, self.sizes.copy_bytes)
        on_stage("GEMMs", 0.02)
        gemms = tuple(self._gemms())
        fp8_gemms = tuple(self._fp8_gemms())
        self._release()
        on_stage("attention", 0.35)
        tokens, spec = self.sizes.attention_tokens, self.sizes.layer_spec
        attention = tuple(
            measure_attention(self.timer, length, tokens, spec, self.dtype)
            for length in self.sizes.attention_lengths
        )
        self._release()
        on_stage("adapters", 0.4)
        lora, error = fit_lora(list(self._lora()))
        reserved = self._reserved()
        self.notes.append(f"adapters' linears are predicted with a median error of {error:.1%}")
        on_stage("collectives", 0.7)
        points = tuple(self._collectives())
        overlap = self._overlap()
        on_stage("layers", 0.9)
        profile = self._profile(
            copy,
            points,
            gemms=gemms,
            fp8_gemms=fp8_gemms,
            fp8_speedup=FP8_SPEEDUP if fp8_gemms else None,
            attention=attention,
            lora=lora,
            overlap=overlap,
        )
        profile = measure_layers(profile, self.sizes, self.dtype)
        profile = replace(profile, reserved_bytes=reserved, notes="; ".join(self.notes))
        stretch = measure_stretch(profile, self.sizes, self.dtype)
        on_stage("done", 1.0)
        return replace(profile, stretch=stretch)

    def _warm_up(self) -> None:
        """Runs work until the GPU's clock is that under load."""
        size, turns = (_WARM_GEMM, _WARM_TURNS) if self.device.type == "cuda" else (64, 3)
        a, b = (torch.randn(size, size, device=self.device, dtype=self.dtype) for _ in range(2))
        self.timer.sustained_s(lambda: a @ b, turns)

    def _gemms(self) -> Iterator[GemmPoint]:
        shapes = [(shape, self.sizes.gemm_rows) for shape in self.sizes.gemm_shapes]
        heads = [(shape, self.sizes.head_rows) for shape in self.sizes.head_shapes]
        for shape, rows in self._within(itertools.chain(shapes[:8], heads, shapes[8:]), "gemms"):
            yield from measure_gemm(self.timer, shape, rows, self.dtype)

    def _fp8_gemms(self) -> Iterator[GemmPoint]:
        if multiplies_fp8(self.device):
            for shape in self.sizes.fp8_shapes:
                yield from measure_fp8_gemm(self.timer, shape, self.sizes.fp8_rows, self.dtype)

    def _lora(self) -> Iterator[LoraSample]:
        adapters, sizes = self.sizes.lora_adapters, self.sizes
        # The most important first.
        settings = [(spec, tokens) for tokens in sizes.lora_tokens for spec in sizes.lora_specs]
        for spec, tokens in self._within(settings, "lora"):
            yield from measure_lora(spec, tokens, adapters, self.dtype)
            self._release()

    def _collectives(self) -> Iterator[CollectivePoint]:
        ranks = [n for n in (2, 4, 8) if n <= self.world_size and self.world_size % n == 0]
        if self.world_size > 1 and self.world_size not in ranks:
            ranks.append(self.world_size)
        # The widest group first: it fits the link.
        cells = [
            (count, op, size)
            for count in reversed(ranks)
            for op in OPS
            if op != "p2p" or count == 2
            for size in self.sizes.collective_bytes
        ]
        timers = {count: CollectiveTimer(count, self.device) for count in ranks}
        for count, op, size in self._within(cells, "collectives"):
            yield timers[count].measure(op, size)

    def _overlap(self) -> float:
        if self.world_size == 1 or self.device.type != "cuda":
            return 0.0
        timer = CollectiveTimer(self.world_size, self.device)
        return timer.overlap(_OVERLAP_BYTES, _OVERLAP_GEMM)

    def _within(self, items: Iterable[T], stage: str) -> Iterator[T]:
        """The items for which the stage's share of the budget lasts, equal on every rank."""
        end = time.monotonic() + _SHARES[stage] * self.request.budget_s
        left_out = 0
        for index, item in enumerate(items):
            late = torch.tensor(float(time.monotonic() > end), device=self.device)
            dist.all_reduce(late, op=dist.ReduceOp.MAX)
            if index and float(late):
                left_out += 1
                continue
            yield item
        if left_out:
            self.notes.append(f"{stage}: {left_out} settings left out for lack of time")

    def _profile(
        self, copy: float, points: tuple[CollectivePoint, ...], **measured: Any
    ) -> HardwareProfile:
        """The profile as far as it is known before layers are measured."""
        on_gpu = self.device.type == "cuda"
        local = max(self.world_size, torch.cuda.device_count() if on_gpu else 1)
        # With one process there is no link to plan with: only gpus_per_node 1 is right then.
        link = fit_link(points) if points else Link(bytes_per_s=copy / 2, latency_s=1e-5)
        if not points:
            self.notes.append("one process: the link is a guess")
        on_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = torch.cuda.mem_get_info(self.device)[1] if on_gpu else on_host
        return HardwareProfile(
            name=self.request.name,
            gpu=torch.cuda.get_device_name(self.device) if on_gpu else platform.machine(),
            source="measured",
            date=datetime.now(UTC).date().isoformat(),
            versions=_versions(),
            dtype="bfloat16" if self.dtype == torch.bfloat16 else "float32",
            memory_bytes=float(memory),
            reserved_bytes=_RESERVED_BYTES,
            copy_bytes_per_s=copy,
            stream_bytes_per_s=copy,
            host=HostCost(layer_s=0.0, round_s=0.0, job_step_s=0.0),
            gpus_per_node=self.request.gpus_per_node or local,
            intra_node=link,
            collectives=points,
            **measured,
        )

    def _reserved(self) -> float:
        """Memory used outside torch's tensors with all kernels loaded, before links are used."""
        if self.device.type != "cuda":
            return _RESERVED_BYTES
        self._release()
        free, total = torch.cuda.mem_get_info(self.device)
        return float(total - free - torch.cuda.memory_reserved(self.device))

    def _release(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _versions() -> str:
    found = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    found.append(f"megatron-core {importlib.metadata.version('megatron-core')}")
    if torch.cuda.is_available():
        found.append(f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}")
    return ", ".join(found)
