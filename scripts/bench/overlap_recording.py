"""Records steps of `tp_overlap.py` with torch.profiler and prints where their time goes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_world import say
from overlap_cases import Step
from overlap_profile import (
    Event,
    analyse,
    events_of,
    last_step,
    late_kernels,
    matched_ratios,
)
from overlap_table import as_json, table
from torch.profiler import ProfilerActivity, profile

_STEPS = 3
"""In a row, of which the last counts."""
_WORDS = ("lora_gemm", "rank_rows", "rank_sums")
"""Kernels that each linear runs."""


def profile_steps(
    steps: Mapping[str, Step],
    installed: Callable[[Step], AbstractContextManager[None]],
    wait: Callable[[], None],
    *,
    layers: int,
    path: Path,
) -> None:
    """Records each step; the first process prints and writes what they show, and a line of each.

    Waits for the device.

    Args:
        steps: the first is what others are compared with.
        wait: for the device and the other processes.
        path: of the results, `.json`; each step's traces, one a process, lie beside it.
    """
    events: dict[str, list[Event]] = {}
    for key, step in steps.items():
        with installed(step):
            recorded = _record(step, wait)
        # At once: the next recording takes this one's times away.
        trace = path.with_name(f"{path.stem}_{key.replace(' ', '_')}_{dist.get_rank()}.json.gz")
        events[key] = last_step(events_of(_exported(recorded, trace)), _STEPS)
    parts = {key: step.parts for key, step in steps.items()}
    lines: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(lines, process_lines(events, parts, layers))
    if dist.get_rank() != 0:
        return
    try:
        _show(events, parts, layers, path)
        say("\n".join(line for mine in zip(*lines, strict=True) for line in mine))
    except Exception as error:  # any: the other processes go on to the next case
        say(f"profile: left out, {type(error).__name__}: {error}")


def process_lines(
    events: Mapping[str, list[Event]], parts: Mapping[str, int], layers: int
) -> list[str]:
    """A line a variant: what this process waited, and which of its GEMMs something held up.

    The slowest process waits least; others wait for it.
    """
    lines = []
    for key, mine in events.items():
        late = late_kernels(mine, parts[key], layers, "lora_gemm")
        held = ", ".join(f"{x.place} {x.length_us:.0f} for {x.usual_us:.0f}" for x in late)
        idle = analyse(mine).main_idle_us if mine else 0.0
        lines.append(
            f"{key}, process {dist.get_rank()}: idle {idle:.0f} us, late GEMMs: {held or 'none'}"
        )
    return lines


def _record(call: Callable[[], None], wait: Callable[[], None]) -> profile:
    wait()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(_STEPS):
            call()
        torch.cuda.synchronize()  # no barrier here, whose kernels would be recorded
    return recorded


def _exported(recorded: profile, trace: Path) -> dict[str, Any]:
    trace.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(trace))
    with gzip.open(trace, "rt") as file:
        return json.load(file)


def _show(
    events: Mapping[str, list[Event]], parts: Mapping[str, int], layers: int, path: Path
) -> None:
    profiles = {key: analyse(mine) for key, mine in events.items()}
    whole = events[next(iter(events))]
    ratios: dict[str, dict[str, float]] = {key: {} for key in events}
    for key, mine in events.items():
        for word in _WORDS:
            ratios[key] |= matched_ratios(whole, mine, parts[key], layers, word)
    path.write_text(json.dumps(as_json(profiles, ratios), indent=1))
    say("\n".join(table(profiles, ratios)))
