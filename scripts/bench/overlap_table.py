"""Shows where the steps of several variants spend their time, side by side."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from overlap_profile import Gap, Kernels, StepProfile, category

_SHOWN = ("span_us", "main_busy_us", "host_gaps_us", "short_gaps_us", "beside_us")
_WIDTH = 34
"""Of a variant's columns in the table."""
_LONGEST = 6
"""Groups of gaps that are shown."""


def table(
    profiles: Mapping[str, StepProfile], ratios: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Lines to print: variants side by side, the first the one to compare with.

    Exclusive times and the main stream's idle time make up a step.
    """
    names = list(profiles)
    first = profiles[names[0]]
    lines = [" ".join([f"{'us':20}", *(f"{name:>{_WIDTH}}" for name in names)])]
    for field in _SHOWN:
        values = (getattr(p, field) for p in profiles.values())
        lines.append(" ".join([f"{field:20}", *(f"{v:{_WIDTH}.0f}" for v in values)]))
    heads = f"{'count':>7} {'total':>9} {'exclusive':>9} {'ratio':>6}"
    lines.append(" ".join([f"{'category':20}", *[heads] * len(names)]))
    for kind in sorted({k for p in profiles.values() for k in p.kernels}):
        cells = [_cell(p.kernels.get(kind), first.kernels.get(kind)) for p in profiles.values()]
        lines.append(" ".join([f"{kind:20}", *cells]))
    idle = (_times(p.main_idle_us, first.main_idle_us) for p in profiles.values())
    lines.append(" ".join([f"{'idle':20}", *(f"{cell:>{_WIDTH}}" for cell in idle)]))
    for name, profile in profiles.items():
        lines += [f"{name}: {line}" for line in _gap_lines(profile)]
        mine = ", ".join(f"{k} {v:.3f}" for k, v in ratios.get(name, {}).items())
        lines += [f"{name} / {names[0]}: {mine}"] if mine else []
    return lines


def _cell(mine: Kernels | None, first: Kernels | None) -> str:
    if mine is None:
        return " " * _WIDTH
    times = _times(mine.exclusive_us, first.exclusive_us if first else 0.0)
    return f"{mine.count:6d}x {mine.total_us:9.0f} {times}"


def _times(exclusive_us: float, first_us: float) -> str:
    ratio = f"{exclusive_us / first_us:.3f}" if first_us else ""
    return f"{exclusive_us:9.0f} {ratio:>6}"


def _gap_lines(profile: StepProfile) -> Iterable[str]:
    """Gaps by the categories around them, those with most time first; then the longest."""
    groups: dict[str, list[Gap]] = defaultdict(list)
    for gap in profile.gaps:
        cause = "host" if gap.is_host else "device"
        groups[f"{category(gap.before)} -> {category(gap.after)} ({cause})"].append(gap)
    time_of = {key: sum(g.length_us for g in gaps) for key, gaps in groups.items()}
    for key in sorted(groups, key=lambda k: -time_of[k])[:_LONGEST]:
        yield f"gaps {key}: {len(groups[key])}x {time_of[key]:.0f} us"
    for gap in itertools.islice(profile.gaps, 3):
        beside = ", ".join(f"{k} {v:.0f}" for k, v in gap.beside_us.items()) or "nothing"
        yield (
            f"gap {gap.length_us:.0f} us {gap.before[:36]} -> {gap.after[:36]}, beside it {beside}"
        )


def as_json(
    profiles: Mapping[str, StepProfile], ratios: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """All of it, by variant."""
    return {
        name: dataclasses.asdict(p) | {"ratios": dict(ratios.get(name, {}))}
        for name, p in profiles.items()
    }
