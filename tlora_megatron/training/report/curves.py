"""Draws a run's curves: matplotlib's SVG, cut down to what a page needs.

Colours and fonts in it are CSS variables, so one drawing serves light and dark mode.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from typing import Any
from xml.etree import ElementTree

import numpy as np

from tlora_megatron.training.report.jobs import NUM_COLORS, Curve, ReportJob

SMOOTH_ABOVE = 200
"""Points from which on a curve is drawn smoothed over its raw values."""

# Stand-ins that matplotlib draws with; `_inline` turns each into the CSS variable behind it.
_JOB, _TEXT, _GRID, _BAD, _PAPER, _STRONG = (f"#0000a{i}" for i in range(6))
_SVG = "{http://www.w3.org/2000/svg}"
_VARIABLES = {"a0": "job", "a1": "muted", "a2": "grid", "a3": "bad", "a4": "card", "a5": "text"}
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1, 2)))
_LOG_ABOVE = 30
_SMALL, _LARGE, _WIDE = (3.1, 1.75), (6.2, 2.6), (12.6, 3.3)
_DROPPED = (f"{_SVG}metadata", f"{_SVG}style")
ElementTree.register_namespace("svg", _SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelStyle:
    """How the panels of one page are drawn, the same for every job so that they compare."""

    size: tuple[float, float]
    """Width and height of a panel in inches."""
    num_points: int
    """Points a curve is thinned to, so that the page stays light with many jobs."""
    log_keys: frozenset[str]
    """Curves on a log axis."""

    @classmethod
    def for_jobs(cls, jobs: list[ReportJob]) -> PanelStyle:
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


def _draw(size: tuple[float, float], salt: str, paint: Callable[[Any], None]) -> str:
    """An inline SVG of one axes of `size` inches filled by `paint`; `salt` makes its ids unique."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    except ImportError as error:
        raise ImportError("report.html needs matplotlib; pip install matplotlib") from error
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 7.5}):
        figure = Figure(figsize=size)
        left, bottom = 0.4 / size[0], 0.24 / size[1]
        axes = figure.add_axes((left, bottom, 0.98 - left, 0.95 - bottom))
        paint(axes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=(1, 2, 2.5, 5, 10)))
        axes.yaxis.set_major_locator(_y_ticks(axes))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
        axes.minorticks_off()
        axes.tick_params(length=0, colors=_TEXT)
        axes.grid(axis="y", color=_GRID, linewidth=0.6)
        axes.spines[:].set_visible(False)
        buffer = StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    return _inline(buffer.getvalue())


def _y_ticks(axes: Any) -> Any:
    """About four round numbers; on a log axis powers of ten, or 1, 2, 5 where it spans few."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if axes.get_yscale() == "linear":
        return MaxNLocator(nbins=4, steps=(1, 2, 2.5, 5, 10))
    low, high = axes.get_ylim()
    return LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,), numticks=6)


def _inline(svg: str) -> str:
    """matplotlib's SVG file cut down to what an HTML page needs, in the page's colours and font."""
    root = ElementTree.fromstring(svg)
    _prune(root)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img"}
    text = ElementTree.tostring(root, encoding="unicode").replace(f' xmlns:svg="{_SVG[1:-1]}"', "")
    text = text.replace("<svg:", "<").replace("</svg:", "</")
    return re.sub(r"#0000([ac]\d)\b", lambda m: f"var(--{_VARIABLES.get(m[1], m[1])})", text)


def _prune(parent: ElementTree.Element) -> None:
    """Drops what paints nothing, groups that only nest, fonts, and digits under 0.1 points."""
    parent.tail = None
    if parent.tag != f"{_SVG}text":
        parent.text = None
    children: list[ElementTree.Element] = []
    for child in parent:
        _prune(child)
        attributes = child.attrib
        if child.tag == f"{_SVG}g" and not attributes.get("id", "").startswith("job-"):
            attributes.pop("id", None)
        for name in {"d", "x", "y", "width", "height", "transform"} & attributes.keys():
            tenths = re.sub(r"(\.\d)\d+", r"\1", attributes[name])
            attributes[name] = re.sub(r"\.0\b| (?=[MLCz])|(?<=[MLCz]) ", "", tenths)
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        if "style" in attributes:
            style = re.sub(r"font-family: [^;]*; |; $", "", attributes["style"])
            attributes["style"] = style.replace(": ", ":").replace("; ", ";")
        if child.tag == f"{_SVG}g" and not attributes:
            children.extend(child)
        elif child.tag not in _DROPPED and attributes.get("style") != "fill:none":
            children.append(child)
    parent[:] = [child for child in children if len(child) or child.attrib]


def _plot(axes: Any, curve: Curve, points: int, *, log: bool, smooth: bool, **style: Any) -> None:
    """One curve of at most about `points` points; a long one is smoothed, its raw values behind."""
    steps, values = curve
    if not smooth or len(steps) <= SMOOTH_ABOVE:
        dot = {"marker": "."} if len(steps) == 1 else {}
        axes.plot(*_thin(curve, points), **style, **dot)
        return
    axes.plot(*_thin(curve, points), **style | {"alpha": 0.3, "linewidth": 0.6})
    axes.plot(*_thin((steps, _smooth(values, log=log)), points // 2), **style)


def _thin(curve: Curve, points: int) -> Curve:
    """At most `points + 2` points: of each stretch the lowest and the highest, so spikes stay."""
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


def compact(value: float) -> str:
    """A tick or table number in few characters: 0.0002 as 2e-4, 15000 as 15k."""
    if (value and abs(value) < 0.01) or abs(value) >= 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def panel(job: ReportJob, key: str, style: PanelStyle) -> str:
    """The SVG of one of a job's curves, with its evaluations (loss) and incidents."""
    train, evals = job.curve(key), job.curve("eval_loss" if key == "loss" else "")
    if not len(train[0]) + len(evals[0]):
        return '<div class="none">no values</div>'
    wild, num_dots = key in ("loss", "grad_norm"), max(20, style.num_points // 8)
    log = key in style.log_keys and min([*train[1], *evals[1]]) > 0
    dots = {"marker": "o", "markersize": 4.5, "markeredgecolor": _PAPER, "clip_on": False}

    def paint(axes: Any) -> None:
        axes.set_yscale("log" if log else "linear")
        axes.set_xlim(0, 1.02 * max(1, job.last_step))
        if key == "eval_exact_match":
            axes.set_ylim(-0.04, 1.04)
            axes.plot(*_thin(train, num_dots), color=_JOB, linewidth=1.2, **dots)
            return
        _plot(axes, train, style.num_points, log=log, smooth=wild, color=_JOB, linewidth=1.2)
        axes.plot(*_thin(evals, num_dots), color=_STRONG, linestyle="none", **dots)
        if wild:
            _mark_incidents(axes, job)

    return _draw(style.size, f"{job.index}-{key}", paint)


def _mark_incidents(axes: Any, job: ReportJob) -> None:
    """Ticks along the bottom, at most a hundred (more cannot be told apart), as one path."""
    steps = np.unique(np.round(job.incidents() / max(1, job.last_step), 2)) * job.last_step
    x, y = np.repeat(steps, 3), np.tile((0.0, 0.07, np.nan), len(steps))
    axes.plot(x, y, color=_BAD, linewidth=1, transform=axes.get_xaxis_transform(), clip_on=False)


def overview(jobs: list[ReportJob], style: PanelStyle) -> str:
    """Every job's training loss in one SVG; pointing at a curve names its job."""
    curves = {job.index: job.curve("loss") for job in jobs if job.curve("loss")[0].size}
    log = "loss" in style.log_keys and all(y.min() > 0 for _, y in curves.values())
    width = 1.3 if len(jobs) <= NUM_COLORS else 0.8

    def paint(axes: Any) -> None:
        axes.set_yscale("log" if log else "linear")
        axes.set_xlim(0, 1.01 * max(1, *(job.last_step for job in jobs)))
        for index, (steps, values) in curves.items():
            turn, color = divmod(index, NUM_COLORS)
            line = {"color": f"#0000c{color}", "linestyle": _DASHES[turn % len(_DASHES)]}
            smooth = _smooth(values, log=log) if len(steps) > SMOOTH_ABOVE else values
            thin = _thin((steps, smooth), style.num_points)
            axes.plot(*thin, gid=f"job-{index}", linewidth=width, **line)

    names = {str(job.index): html.escape(job.name) for job in jobs}
    title = r'<g class="s"><title>{}</title>'
    svg = _draw(_WIDE, "overview", paint)
    return re.sub(r'<g id="job-(\d+)">', lambda match: title.format(names[match[1]]), svg)


def scatter(curves: dict[int, Curve]) -> str:
    """One wide SVG of dots, each set in the page's colour of its key.

    The axis ends a little above what most values of each are: single ones, like the first step's,
    may be many times as large and are drawn at its edge.
    """
    low = 0.97 * min(values.min() for _, values in curves.values())
    high = 1.05 * max(float(np.quantile(values, 0.8)) for _, values in curves.values())

    def paint(axes: Any) -> None:
        axes.set_xlim(0, 1.01 * max(steps.max() for steps, _ in curves.values()))
        axes.set_ylim(low, max(high, 1.01 * low))
        for color, (steps, values) in sorted(curves.items()):
            x, y = _thin((steps, np.minimum(values, high)), 600)
            style = {"linestyle": "none", "marker": ".", "markersize": 4, "clip_on": False}
            axes.plot(x, y, color=f"#0000c{color}", **style)

    return _draw(_WIDE, "nano-batches", paint)
