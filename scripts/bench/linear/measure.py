"""Checks and times providers on the operands of one shape and token count."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch

from scripts.bench.harness.graph_timing import Replay, Sample, time_interleaved, warm_up
from scripts.bench.linear.baselines import BASELINES, PlainFactors, draw_factors
from scripts.bench.linear.check import MAX_ERROR, FrozenRows, worst_error
from scripts.bench.linear.fused import (
    FP8,
    FrozenFp8,
    FusedLinear,
    GivenRows,
    QuantisedRows,
    build_factors,
    quantised_bases,
    row_groups,
    with_dropout,
)
from scripts.bench.linear.results import Row
from scripts.bench.linear.workload import AdapterMix, Backward, Forward, Frozen, Provider, Workload
from tlora_megatron.ops.lora.kernel_choice import VARIABLE, choose_ops
from tlora_megatron.ops.lora.linear_ops import LinearOps, SiteFactors
from tlora_megatron.ops.quantised.weight import QuantWeight


def versions(device: torch.device, commit: str) -> dict[str, str]:
    try:
        triton = str(importlib.import_module("triton").__version__)
    except ImportError:
        triton = ""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton, "commit": commit}


def linear_ops(provider: str, device: torch.device, dtype: torch.dtype) -> LinearOps:
    """Kernels of the provider `tlora` (the package's choice) or `tlora_NAME`, if they run here."""
    before = os.environ.get(VARIABLE)
    _, _, forced = provider.partition("_")
    if forced:
        os.environ[VARIABLE] = forced
    try:
        return choose_ops(device, dtype)
    finally:
        if forced:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before


class AdapterSets:
    """Factors of one mix of adapters over a workload, made when first asked for."""

    def __init__(self, workload: Workload, mix: AdapterMix) -> None:
        self.mix = mix
        self._workload = workload

    @cached_property
    def fused(self) -> tuple[SiteFactors, ...]:
        """A pair for each target, as the package holds them."""
        return build_factors(self._workload, self.mix)

    @cached_property
    def plain(self) -> tuple[PlainFactors, ...]:
        return draw_factors(self._workload, self.mix)


class _Replays(NamedTuple):
    forward: Replay[Forward]
    backward: Replay[Backward]


class CellMeasurer:
    """Measures providers one after another, each in turns with the frozen linear."""

    def __init__(self, workload: Workload, versions: dict[str, str], *, rounds: int) -> None:
        self._workload = workload
        self._versions = versions
        self._rounds = rounds
        self._frozen = self._captured(Frozen(workload))
        self._rows: dict[bool, FrozenRows] = {}

    def measure(
        self, name: str, adapters: AdapterSets, dropout: float
    ) -> tuple[Row | None, str | None]:
        """A provider's row, or why there is none."""
        on_gpu = self._workload.device.type == "cuda"
        try:
            return self._measured(name, adapters, dropout)
        except Exception as problem:  # Triton's are no RuntimeError; the other cells go on
            if on_gpu:
                torch.cuda.synchronize()  # raises where the process is beyond repair
            return None, f"{type(problem).__name__}: {str(problem)[:300]}"
        finally:
            if on_gpu:
                torch.cuda.empty_cache()  # a destroyed graph's memory serves no other graph

    def _measured(
        self, name: str, adapters: AdapterSets, dropout: float
    ) -> tuple[Row | None, str | None]:
        provider = self._provider(name, adapters, dropout)
        replays = self._frozen if name == "frozen" else self._captured(provider)
        provider.clear()
        results = replays.forward.first_output(), replays.backward.first_output()
        operands, ends = self._workload.sets[0], adapters.mix.ends
        error = worst_error(provider, operands, self._frozen_rows(name), ends, results)
        if not error <= MAX_ERROR:
            return None, f"wrong: rel_error must be at most {MAX_ERROR}, got {error:.2e}"
        frozen = self._frozen
        turns = (frozen.forward, replays.forward, frozen.backward, replays.backward)
        samples = time_interleaved(turns, self._workload.device, self._rounds)
        return self._row(name, len(adapters.mix.ranks), dropout, samples, error), None

    def _provider(self, name: str, adapters: AdapterSets, dropout: float) -> Provider:
        workload, mix = self._workload, adapters.mix
        if name == "frozen":
            return Frozen(workload)
        if name in BASELINES:
            return BASELINES[name](workload, mix, adapters.plain, dropout)
        if name == "frozen_fp8":
            return FrozenFp8(workload, self._quantised)
        ops = linear_ops("tlora" if name in FP8 else name, workload.device, workload.dtype)
        factors, rows = with_dropout(adapters.fused, dropout), row_groups(mix, dropout=dropout)
        weights = [operands.weight_NK for operands in workload.sets]
        bases = self._quantised if name in FP8 else weights
        if name == "tlora_fp8_given":
            given = GivenRows(name, ops, workload, factors, rows, bases)
            given.quantise(self._quantised)
            return given
        return FusedLinear(name, ops, workload, factors, rows, bases)

    def _frozen_rows(self, name: str) -> FrozenRows:
        """What the frozen linear computes, of an FP8 base by its definition."""
        is_fp8, operands = name in FP8, self._workload.sets[0]
        if is_fp8 not in self._rows:
            made = QuantisedRows(operands, self._quantised[0]) if is_fp8 else FrozenRows(operands)
            self._rows[is_fp8] = made
        return self._rows[is_fp8]

    @cached_property
    def _quantised(self) -> tuple[QuantWeight, ...]:
        return quantised_bases(self._workload)

    def _captured(self, provider: Provider) -> _Replays:
        """Runs the provider on every buffer set, then captures it."""
        device, indices = self._workload.device, range(len(self._workload.sets))

        def run() -> None:
            for index in indices:
                provider.backward(index, provider.forward(index))

        warm_up(run, device)
        forward = Replay([partial(provider.forward, i) for i in indices], device)
        kept = forward.outputs

        def backward_of(index: int) -> Backward:
            return provider.backward(index, kept[index])

        backward = Replay([partial(backward_of, i) for i in indices], device)
        return _Replays(forward, backward)

    def _row(
        self, name: str, adapters: int, dropout: float, samples: Sequence[Sample], error: float
    ) -> Row:
        frozen_fwd, fwd, frozen_bwd, bwd = samples
        frozen_us = frozen_fwd.median_us + frozen_bwd.median_us
        return {
            **self._versions, "shape": self._workload.shape.name, "tokens": self._workload.tokens,
            "adapters": adapters, "dropout": dropout, "provider": name, "fwd_us": fwd.median_us,
            "bwd_us": bwd.median_us, "frozen_fwd_us": frozen_fwd.median_us,
            "frozen_bwd_us": frozen_bwd.median_us,
            "ratio": (fwd.median_us + bwd.median_us) / frozen_us, "rel_error": error,
            "spread": max(fwd.spread, bwd.spread),
            "frozen_spread": max(frozen_fwd.spread, frozen_bwd.spread),
        }  # fmt: skip
