"""Where a step's time goes: kernels, idle stretches of the main stream, what ran beside them.

Pure functions of what `overlap_recording.py` recorded. Times are microseconds.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_CATEGORIES = (
    ("attention", ("flash", "fmha", "sdpa", "attention")),  # first: their types are cutlass's
    ("GEMM", ("lora_gemm", "gemm", "nvjet", "cutlass", "_up_kernel", "_dgrad_kernel")),
    ("s, dS", ("rank_rows", "_down_kernel")),
    ("dA, dB", ("rank_sums",)),
    ("reduction sum", ("sum_slices", "two_shot")),
    ("NCCL", ("nccl",)),
    ("copies", ("memcpy", "memset")),
    ("norm, elementwise", ("norm", "swiglu", "rotate", "elementwise", "_forward_", "_backward_")),
)
"""The first category of which a kernel's name holds a word; others are "other"."""
_TRITON = {"_backward_up_kernel": "s, dS", "_backward_down_kernel": "dA, dB"}
"""The Triton path's names that words would put elsewhere."""
_IS_GAP_US = 1.0
"""Shorter ones are what the GPU takes between any two kernels."""
_PLACES = ("qkv", "o", "gate_up", "down")
_IS_LATE = 1.25
"""Times what its like take, from which a kernel is late."""


class Event(NamedTuple):
    """A kernel or copy."""

    name: str
    stream: int
    begin: float
    end: float
    launched: float
    """When the host had handed it over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A stretch in which the main stream runs nothing."""

    before: str
    after: str
    """Names of the kernels around it."""
    length_us: float
    is_host: bool
    """The kernel after it was handed over later than the one before it ended."""
    beside_us: dict[str, float]
    """By category: what other streams ran meanwhile; with none, it waits for an event or a copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Those of one category."""

    count: int
    total_us: float
    """Of all streams. Kernels begin before the last one has ended, and wait: it may count twice."""
    exclusive_us: float
    """Added to the main stream's end by its own kernels. Over all categories, `main_busy_us`."""


class Late(NamedTuple):
    """A kernel that took much longer than those of its place in other layers and nano-batches."""

    place: str
    length_us: float
    usual_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One step on one GPU."""

    span_us: float
    """From its first kernel to the end of its last."""
    main_busy_us: float
    main_idle_us: float
    host_gaps_us: float
    """Part of the idle time before kernels that the host was late with."""
    short_gaps_us: float
    """Part of the idle time in stretches shorter than gaps."""
    beside_us: float
    """That other streams' kernels ran while main ran some: hidden, but for what it slows down."""
    kernels: dict[str, Kernels]
    """By category."""
    gaps: tuple[Gap, ...]
    """Longest first."""


def category(name: str) -> str:
    """What a kernel does, by its name."""
    for known, found in _TRITON.items():
        if known in name:
            return found
    lower = name.lower()
    return next((c for c, words in _CATEGORIES if any(w in lower for w in words)), "other")


def events_of(trace: Mapping[str, Any]) -> list[Event]:
    """Kernels and copies of a Chrome trace of torch.profiler, in the order of their launches."""
    launches, found = {}, []
    for entry in trace["traceEvents"]:
        kind, args = entry.get("cat", ""), entry.get("args", {})
        if kind in ("cuda_runtime", "cuda_driver") and "correlation" in args:
            launches[args["correlation"]] = entry["ts"] + entry["dur"]
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            found.append((entry, args))
    events = [
        Event(
            entry["name"],
            int(args["stream"]),
            entry["ts"],
            entry["ts"] + entry["dur"],
            launches.get(args.get("correlation"), float("-inf")),
        )
        for entry, args in found
    ]
    return sorted(events, key=lambda e: (e.launched, e.begin))


def last_step(events: Sequence[Event], steps: int) -> list[Event]:
    """Events of the last of several equal steps: its host has a lead, as in a run."""
    return list(events[len(events) - len(events) // steps :])


def analyse(events: Sequence[Event]) -> StepProfile:
    """What one step's events show.

    The main stream is that with the most GEMM time.
    """
    kernels: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        kernels[category(event.name)].append(event)
    main = _main_stream(kernels.get("GEMM") or events)
    mine = sorted((e for e in events if e.stream == main), key=lambda e: e.begin)
    others = [e for e in events if e.stream != main]
    begin, end = min(e.begin for e in events), max(e.end for e in events)
    runs = _union((e.begin, e.end) for e in mine)
    busy = sum(e - b for b, e in runs)
    gaps = sorted(_gaps(mine, others), key=lambda g: -g.length_us)
    beside = [(e.begin, e.end) for e in others if category(e.name) != "copies"]
    exclusive = _exclusive(mine)
    return StepProfile(
        span_us=end - begin,
        main_busy_us=busy,
        main_idle_us=end - begin - busy,
        host_gaps_us=sum(g.length_us for g in gaps if g.is_host),
        short_gaps_us=runs[-1][1] - runs[0][0] - busy - sum(g.length_us for g in gaps),
        beside_us=sum(_overlap(run, other) for run in runs for other in _union(beside)),
        kernels={
            kind: Kernels(
                count=len(alike),
                total_us=sum(e.end - e.begin for e in alike),
                exclusive_us=exclusive.get(kind, 0.0),
            )
            for kind, alike in kernels.items()
        },
        gaps=tuple(gaps),
    )


def _main_stream(events: Sequence[Event]) -> int:
    times: dict[int, float] = defaultdict(float)
    for event in events:
        times[event.stream] += event.end - event.begin
    return max(times, key=lambda stream: times[stream])


def _exclusive(mine: Sequence[Event]) -> dict[str, float]:
    """By category: what one stream's kernels, in order, add to the end of those before them."""
    added: dict[str, float] = defaultdict(float)
    ended = float("-inf")
    for event in mine:
        added[category(event.name)] += max(0.0, event.end - max(event.begin, ended))
        ended = max(ended, event.end)
    return added


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans in order, those that touch joined."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _overlap(first: tuple[float, float], second: tuple[float, float]) -> float:
    return max(0.0, min(first[1], second[1]) - max(first[0], second[0]))


def _gaps(mine: Sequence[Event], others: Sequence[Event]) -> Iterable[Gap]:
    """Of one stream's events in order, whose kernels may overlap their next."""
    ended = mine[0]
    for event in mine[1:]:
        span = (ended.end, event.begin)
        if span[1] - span[0] >= _IS_GAP_US:
            beside: dict[str, float] = defaultdict(float)
            for other in others:
                shared = _overlap(span, (other.begin, other.end))
                if shared:
                    beside[category(other.name)] += shared
            yield Gap(
                before=ended.name,
                after=event.name,
                length_us=span[1] - span[0],
                is_host=event.launched > ended.end,
                beside_us=dict(beside),
            )
        ended = max(ended, event, key=lambda e: e.end)


def matched_ratios(
    whole: Sequence[Event], split: Sequence[Event], parts: int, layers: int, word: str
) -> dict[str, float]:
    """By place in a layer: a kernel's time over all nano-batches, over its time unsplit.

    A half layer's two kernels follow one another in each nano-batch, nano-batch by nano-batch;
    forward from qkv to down, and back. Empty where there are not as many kernels as that takes.

    Args:
        word: of the kernels' names.
    """
    base, cut = ([e for e in events if word in e.name] for events in (whole, split))
    places = _places(len(base), layers, word)
    if len(cut) != parts * len(base) or not places:
        return {}
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for index, (place, event) in enumerate(zip(places, base, strict=True)):
        times[place][1] += event.end - event.begin
        times[place][0] += sum(cut[i].end - cut[i].begin for i in _parts_of(index, parts))
    return {place: cut_us / base_us for place, (cut_us, base_us) in times.items()}


def late_kernels(events: Sequence[Event], parts: int, layers: int, word: str) -> list[Late]:
    """Kernels that took longer than their like, by place: something held them up.

    Args:
        parts: nano-batches.
        word: as of `matched_ratios`.
    """
    mine = [e for e in events if word in e.name]
    places = _places(len(mine) // parts, layers, word)
    times: dict[str, list[float]] = defaultdict(list)
    for index, place in enumerate(places):
        times[place] += [mine[i].end - mine[i].begin for i in _parts_of(index, parts)]
    usual = {place: statistics.median(lengths) for place, lengths in times.items()}
    return [
        Late(place, length, usual[place])
        for place, lengths in times.items()
        for length in lengths
        if length > _IS_LATE * usual[place]
    ]


def _places(count: int, layers: int, word: str) -> list[str]:
    """Of each kernel of an unsplit step, in order; empty where there are not as many as there must
    be."""
    one_way = len(_PLACES) * layers
    if count not in (one_way, 2 * one_way):
        return []
    back = [f"{word} back {place}" for place in _PLACES[::-1]] * layers
    forward = [f"{word} forward {place}" for place in _PLACES] * layers
    return back if count == one_way else forward + back


def _parts_of(index: int, parts: int) -> Iterable[int]:
    """Where an unsplit kernel's parts are among those of a step in nano-batches."""
    half, second = divmod(index, 2)
    return (2 * (half * parts + part) + second for part in range(parts))
