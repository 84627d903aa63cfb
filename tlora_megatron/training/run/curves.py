"""Reads what a run's files say about its jobs, and draws their curves."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tlora_megatron.page import (
    BAD,
    CARD,
    JOB,
    MUTED,
    NUM_COLORS,
    TEXT,
    css_color,
    draw,
    in_two_widths,
    paint_color,
)
from tlora_megatron.training.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Curve = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportJob:
    """One job as the run's files describe it; `summary` and `config` may be empty."""

    index: int
    name: str
    summary: dict[str, Any]
    config: dict[str, Any]
    records: list[dict[str, Any]]

    def curve(self, key: str) -> Curve:
        """Steps and values of `key`, each `[points]`, without the values that are not finite."""
        points = [(r["step"], r[key]) for r in self.records if r.get(key) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.asarray(steps, dtype=float), np.asarray(values, dtype=float)

    def incidents(self) -> np.ndarray:
        """Steps whose update was skipped or whose numbers were not finite."""
        steps = [r["step"] for r in self.records if r.get("skipped") or r.get("nonfinite")]
        return np.asarray(steps, dtype=float)

    def fact(self, key: str, fallback: Any = None) -> Any:
        """A value of summary.json, or `fallback` while the run has not written it."""
        value = self.summary.get(key)
        return fallback if value is None else value

    @property
    def last_step(self) -> int:
        """The last step in the metrics; 0 without metrics."""
        return max((r["step"] for r in self.records), default=0)

    @property
    def status(self) -> str:
        """One of finished, failed, rejected, running, or waiting (before the first step)."""
        return str(self.fact("status", "running" if self.records else "waiting"))

    @property
    def color(self) -> str:
        """The CSS colour of this job, the same in every part of the page."""
        return css_color(self.index)


def read_jobs(output_dir: Path, config: dict[str, Any], summary: dict[str, Any]) -> list[ReportJob]:
    """All jobs that any file names: in the order of the configuration, then by name."""
    configs = {job["name"]: job for job in config.get("jobs", [])}
    summaries = summary.get("jobs", {})
    folders = sorted(path.parent.name for path in output_dir.glob(f"jobs/*/{METRICS_FILE}"))
    jobs = []
    for index, name in enumerate(dict.fromkeys([*configs, *summaries, *folders])):
        path = output_dir / "jobs" / name / METRICS_FILE
        records = read_metrics(path) if name in folders else []
        facts, spec = summaries.get(name, {}), configs.get(name, {})
        jobs.append(ReportJob(index=index, name=name, summary=facts, config=spec, records=records))
    return jobs


SMOOTH_ABOVE = 200
"""A curve with more points than this is drawn smoothed over its raw values."""

_Style = dict[str, Any]
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1, 2)))
_LOG_ABOVE = 30
"""A log axis is used if the largest value is more than this many times the smallest."""
_SMALL, _LARGE, _WIDE, _NARROW = (3.1, 1.95), (5.0, 2.4), (12.6, 3.5), (4.4, 2.7)
"""Sizes of drawings in inches."""
_DOT: _Style = {"marker": "o", "markeredgecolor": CARD, "clip_on": False, "zorder": 5}
"""The dot of an evaluation."""
_STEP = "optimizer step"


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelStyle:
    """Settings of the panels of one page, the same for every job so that they compare."""

    size: tuple[float, float]
    """Width and height of a panel in inches."""
    num_points: int
    """Number of points that a curve is thinned to, so that the page stays small with many jobs."""
    log_keys: frozenset[str]
    """Names of the curves that are drawn on a log axis."""

    @property
    def is_large(self) -> bool:
        """True on the page of a single job, whose panels are larger."""
        return self.size == _LARGE

    @classmethod
    def for_jobs(cls, jobs: list[ReportJob]) -> PanelStyle:
        """The settings for a page with these jobs."""
        log_keys = {
            key
            for key in ("loss", "grad_norm")
            if any(_wants_log(job.curve(key)[1]) for job in jobs)
        }
        return cls(
            size=_LARGE if len(jobs) == 1 else _SMALL,
            num_points=min(400, max(60, 4000 // max(1, len(jobs)))),
            log_keys=frozenset(log_keys),
        )


def _plot(axes: Axes, curve: Curve, points: int, *, log: bool, smooth: bool, **style: Any) -> None:
    """Plots a curve with about `points` points; a long one smoothed, over its raw values."""
    steps, values = curve
    if not smooth or len(steps) <= SMOOTH_ABOVE:
        dot: _Style = {"marker": "."} if len(steps) == 1 else {}
        axes.plot(*_thin(curve, points), **style, **dot)
        return
    axes.plot(*_thin(curve, points), **style | {"alpha": 0.3, "linewidth": 0.6})
    axes.plot(*_thin((steps, _smooth(values, log=log)), points // 2), **style)


def _thin(curve: Curve, points: int) -> Curve:
    """Thins a curve to at most `points + 2` points; keeps the extremes, so that spikes stay."""
    steps, values = curve
    if len(steps) <= points:
        return curve
    keep = {0, len(steps) - 1}
    for stretch in np.array_split(np.arange(len(steps)), points // 2):
        keep |= {stretch[values[stretch].argmin()], stretch[values[stretch].argmax()]}
    order = sorted(keep)
    return steps[order], values[order]


def _smooth(values: np.ndarray, *, log: bool) -> np.ndarray:
    """Centred running mean `[points]` over a fiftieth of the curve, geometric on a log axis."""
    total = np.concatenate(([0.0], np.cumsum(np.log(values) if log else values)))
    half, center = max(2, len(values) // 100), np.arange(len(values))
    begin, end = np.maximum(center - half, 0), np.minimum(center + half + 1, len(values))
    mean = (total[end] - total[begin]) / (end - begin)
    return np.exp(mean) if log else mean


def _wants_log(values: np.ndarray) -> bool:
    return len(values) > 1 and values.min() > 0 and values.max() > _LOG_ABOVE * values.min()


def panel(job: ReportJob, key: str, style: PanelStyle) -> str:
    """Draws one curve of a job, with its evaluations (in the loss) and its incidents."""
    train, evals = job.curve(key), job.curve("eval_loss" if key == "loss" else "")
    if not len(train[0]) + len(evals[0]):
        return '<div class="none">no values</div>'
    wild, num_dots = key in ("loss", "grad_norm"), max(20, style.num_points // 8)
    log = key in style.log_keys and min([*train[1], *evals[1]]) > 0
    dots = _DOT | {"markersize": 6}

    def paint(axes: Axes) -> None:
        axes.set_yscale("log" if log else "linear")
        # A dot at step 0 stands beside the numbers of the other axis.
        axes.set_xlim(*(edge * max(1, job.last_step) for edge in (-0.03, 1.02)))
        if key == "eval_exact_match":
            axes.set_ylim(-0.04, 1.04)
            axes.plot(*_thin(train, num_dots), color=JOB, linewidth=1.2, **dots)
            return
        _plot(axes, train, style.num_points, log=log, smooth=wild, color=JOB, linewidth=1.2)
        axes.plot(*_thin(evals, num_dots), color=TEXT, linestyle="none", **dots)
        if wild:
            _mark_incidents(axes, job)

    return draw(style.size, f"{job.index}-{key}", paint, x_title=_STEP)


def _mark_incidents(axes: Axes, job: ReportJob) -> None:
    """Draws ticks along the bottom as one path; at most a hundred, more cannot be told apart."""
    steps = np.unique(np.round(job.incidents() / max(1, job.last_step), 2)) * job.last_step
    x, y = np.repeat(steps, 3), np.tile((0.0, 0.07, np.nan), len(steps))
    axes.plot(x, y, color=BAD, linewidth=1, transform=axes.get_xaxis_transform(), clip_on=False)


def overview(jobs: list[ReportJob], style: PanelStyle) -> str:
    """Draws the training loss of all jobs; a pointer on a curve shows the name of its job.

    A few jobs' evaluations are dots. Jobs that were stopped early are grey.
    """
    curves = {job.index: job.curve("loss") for job in jobs if job.curve("loss")[0].size}
    evals = {job.index: job.curve("eval_loss") for job in jobs if has_dots(jobs)}
    log = "loss" in style.log_keys and all(y.min() > 0 for _, y in curves.values())
    width = 1.3 if len(jobs) <= NUM_COLORS else 0.8
    stopped = {job.index for job in jobs if job.status == "cancelled"}

    def paint(num_points: int, axes: Axes) -> None:
        axes.set_yscale("log" if log else "linear")
        last_step = max(1, *(job.last_step for job in jobs))
        axes.set_xlim(-0.01 * last_step, 1.01 * last_step)
        for index, (steps, values) in curves.items():
            turn, color = divmod(index, NUM_COLORS)
            line: _Style = {"color": paint_color(color), "linestyle": _DASHES[turn % len(_DASHES)]}
            if index in stopped:
                line = {"color": MUTED, "alpha": 0.5, "zorder": 1}
            smooth = _smooth(values, log=log) if len(steps) > SMOOTH_ABOVE else values
            thin = _thin((steps, smooth), num_points)
            axes.plot(*thin, gid=f"job-{index}", linewidth=width, **line)
        for index, curve in evals.items():
            axes.plot(*curve, linestyle="none", color=paint_color(index), markersize=5, **_DOT)

    names = {str(job.index): html.escape(job.name) for job in jobs}
    title = r'<g class="s"><title>{}</title>'

    def picture(is_wide: bool) -> str:
        size, salt = (_WIDE, "overview") if is_wide else (_NARROW, "narrow overview")
        num_points = style.num_points if is_wide else style.num_points // 2
        svg = draw(size, salt, partial(paint, num_points), x_title=_STEP)
        return re.sub(r'<g id="job-(\d+)">', lambda match: title.format(names[match[1]]), svg)

    return in_two_widths(picture)


def has_dots(jobs: list[ReportJob]) -> bool:
    """True if the overview of these jobs has dots for evaluations; of more they hide the curves."""
    return len(jobs) <= NUM_COLORS and any(len(job.curve("eval_loss")[0]) for job in jobs)


def scatter(curves: dict[int, Curve]) -> str:
    """Draws sets of dots in one wide picture; the key of a set is the number of its colour.

    The axis ends a little above most values of each set. Single values, such as the first step's,
    can be many times as large and are drawn at the edge.
    """
    low = 0.97 * min(values.min() for _, values in curves.values())
    high = 1.05 * max(float(np.quantile(values, 0.8)) for _, values in curves.values())

    def paint(axes: Axes) -> None:
        axes.set_xlim(0, 1.01 * max(steps.max() for steps, _ in curves.values()))
        axes.set_ylim(low, max(high, 1.01 * low))
        for color, (steps, values) in sorted(curves.items()):
            x, y = _thin((steps, np.minimum(values, high)), 600)
            style: _Style = {"linestyle": "none", "marker": ".", "markersize": 4, "clip_on": False}
            axes.plot(x, y, color=paint_color(color), **style)

    def picture(is_wide: bool) -> str:
        size, salt = (_WIDE, "nano-batches") if is_wide else (_NARROW, "narrow nano-batches")
        return draw(size, salt, paint, x_title="step")

    return in_two_widths(picture)
