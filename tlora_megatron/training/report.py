"""`OUT/report.html`: one page with every job's curves and results, readable offline.

matplotlib draws each panel as an SVG that is set into the page; colours and fonts in it are CSS
variables, so one drawing serves light and dark mode. The page has no script and loads nothing.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from tlora_megatron.training.metrics import METRICS_FILE, read_metrics, write_atomic

# Stand-ins that matplotlib draws with; `_inline` turns each into the CSS variable behind it.
_JOB, _TEXT, _GRID, _BAD, _PAPER, _STRONG = (f"#0000a{i}" for i in range(6))
_SVG = "{http://www.w3.org/2000/svg}"
_VARIABLES = {"a0": "job", "a1": "muted", "a2": "grid", "a3": "bad", "a4": "card", "a5": "text"}
_NUM_COLORS = 8
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1, 2)))
_SMOOTH_ABOVE = 200
_LOG_ABOVE = 30
_SMALL, _LARGE, _WIDE = (3.1, 1.75), (6.2, 2.6), (12.6, 3.3)
_DROPPED = (f"{_SVG}metadata", f"{_SVG}style")
ElementTree.register_namespace("svg", _SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
Curve = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What the run's files say of one job; `summary` and `config` are empty where they do not."""

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
        """A value of summary.json, or what the metrics say while the run has not written it."""
        value = self.summary.get(key)
        return fallback if value is None else value

    @property
    def last_step(self) -> int:
        """The last step any line is of; 0 without lines."""
        return max((r["step"] for r in self.records), default=0)

    @property
    def status(self) -> str:
        """finished, failed, rejected, running, or waiting before the first step."""
        return str(self.fact("status", "running" if self.records else "waiting"))

    @property
    def color(self) -> str:
        """The CSS variable of this job's colour, the same in every part of the page."""
        return f"var(--c{self.index % _NUM_COLORS})"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Style:
    """How the panels of one page are drawn, the same for every job so that they compare."""

    size: tuple[float, float]
    """Width and height of a panel in inches."""
    num_points: int
    """Points a curve is thinned to, so that the page stays light with many jobs."""
    log_keys: frozenset[str]
    """Curves on a log axis."""

    @classmethod
    def for_jobs(cls, jobs: list[_Job]) -> _Style:
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


def write_report(output_dir: Path) -> Path:
    """Writes `OUT/report.html` from config.json, summary.json and the metrics; returns its path.

    May be called while the run goes on: files that do not exist yet count as empty.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if a file of the run is corrupt.
    """
    output_dir = Path(output_dir)
    config, summary = (_read_json(output_dir / f"{name}.json") for name in ("config", "summary"))
    jobs = _read_jobs(output_dir, config, summary)
    path = output_dir / "report.html"
    write_atomic(path, _page(output_dir.resolve().name, config, summary.get("run", {}), jobs))
    return path


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} must hold a JSON object, got {error}") from error


def _read_jobs(output_dir: Path, config: dict[str, Any], summary: dict[str, Any]) -> list[_Job]:
    """Every job any file knows of: in the order of the configuration, then by name."""
    configs = {job["name"]: job for job in config.get("jobs", [])}
    summaries = summary.get("jobs", {})
    folders = sorted(path.parent.name for path in output_dir.glob(f"jobs/*/{METRICS_FILE}"))
    jobs = []
    for index, name in enumerate(dict.fromkeys([*configs, *summaries, *folders])):
        path = output_dir / "jobs" / name / METRICS_FILE
        records = read_metrics(path) if name in folders else []
        facts, spec = summaries.get(name, {}), configs.get(name, {})
        jobs.append(_Job(index=index, name=name, summary=facts, config=spec, records=records))
    return jobs


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
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _compact(value)))
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
    if not smooth or len(steps) <= _SMOOTH_ABOVE:
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


def _compact(value: float) -> str:
    """A tick or table number in few characters: 0.0002 as 2e-4, 15000 as 15k."""
    if (value and abs(value) < 0.01) or abs(value) >= 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def _panel(job: _Job, key: str, style: _Style) -> str:
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


def _mark_incidents(axes: Any, job: _Job) -> None:
    """Ticks along the bottom, at most a hundred (more cannot be told apart), as one path."""
    steps = np.unique(np.round(job.incidents() / max(1, job.last_step), 2)) * job.last_step
    x, y = np.repeat(steps, 3), np.tile((0.0, 0.07, np.nan), len(steps))
    axes.plot(x, y, color=_BAD, linewidth=1, transform=axes.get_xaxis_transform(), clip_on=False)


def _overview(jobs: list[_Job], style: _Style) -> str:
    """Every job's training loss in one SVG; pointing at a curve names its job."""
    curves = {job.index: job.curve("loss") for job in jobs if job.curve("loss")[0].size}
    log = "loss" in style.log_keys and all(y.min() > 0 for _, y in curves.values())
    width = 1.3 if len(jobs) <= _NUM_COLORS else 0.8

    def paint(axes: Any) -> None:
        axes.set_yscale("log" if log else "linear")
        axes.set_xlim(0, 1.01 * max(1, *(job.last_step for job in jobs)))
        for index, (steps, values) in curves.items():
            turn, color = divmod(index, _NUM_COLORS)
            line = {"color": f"#0000c{color}", "linestyle": _DASHES[turn % len(_DASHES)]}
            smooth = _smooth(values, log=log) if len(steps) > _SMOOTH_ABOVE else values
            thin = _thin((steps, smooth), style.num_points)
            axes.plot(*thin, gid=f"job-{index}", linewidth=width, **line)

    names = {str(job.index): _text(job.name) for job in jobs}
    title = r'<g class="s"><title>{}</title>'
    svg = _draw(_WIDE, "overview", paint)
    return re.sub(r'<g id="job-(\d+)">', lambda match: title.format(names[match[1]]), svg)


_TITLES = {
    "loss": "Loss",
    "eval_exact_match": "Exact match",
    "grad_norm": "Gradient norm before clipping",
    "lr": "Learning rate",
}


_READING = f"""<p>Lines: training, over the job's own optimizer steps; above {_SMOOTH_ABOVE} steps
loss and gradient norm are smoothed, with the raw values behind. Dots: evaluation.
<b class="bad">Ticks</b> at the bottom: update skipped or value not finite.</p>"""


def _page(title: str, config: dict[str, Any], run: dict[str, Any], jobs: list[_Job]) -> str:
    matched = any(len(job.curve("eval_exact_match")[0]) for job in jobs)
    keys = [key for key in _TITLES if matched or key != "eval_exact_match"]
    style = _Style.for_jobs(jobs)
    overview = ""
    if len(jobs) > 1 and any(len(job.curve("loss")[0]) for job in jobs):
        svg = _overview(jobs, style)
        overview = f"<h2>Training loss</h2><figure>{svg}{_legend(jobs)}</figure>"
    columns, least = (2, 420) if len(jobs) == 1 else (len(keys), 240)
    cards = "".join(_card(job, keys, style) for job in jobs)
    ended = run and all(job.status not in ("running", "waiting") for job in jobs)
    name, written = html.escape(title), time.strftime("%Y-%m-%d %H:%M %Z")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>{_HEAD}'
        f"<style>main{{--columns:{columns};--least:{least}px}}</style></head><body><main><header><h1>{name}</h1>"
        f"<p>{'finished' if ended else 'in progress'} · written {written}</p></header>"
        f"{_facts(config, run, jobs)}<h2>Jobs</h2>{_table(jobs, matched)}{overview}"
        f"<h2>Curves by job</h2>{_READING}{cards}</main></body></html>\n"
    )


def _facts(config: dict[str, Any], run: dict[str, Any], jobs: list[_Job]) -> str:
    """The run's own numbers: tiles for the first ones, a line for the rest."""
    states = [job.status for job in jobs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    layout = run.get("layout") or config.get("parallel", {})
    sizes = [
        f"{axis.upper()} {layout[f'{axis}_size']}" for axis in _AXES if layout.get(f"{axis}_size")
    ]
    wall, rate = run.get("wall_time_s"), run.get("tokens_per_s")
    tiles = {
        "tokens per second": None if rate is None else f"{rate:,.0f}",
        f"jobs ({counts})": len(jobs),
        f"processes ({' · '.join(sizes) or 'layout not known yet'})": run.get("world_size"),
        "wall time": None if wall is None else timedelta(seconds=round(wall)),
    }
    base, settings = config.get("base_model", {}), config.get("run", {})
    more = {
        "base model": base.get("path") or base.get("config"),
        "dtype": base.get("dtype"),
        "sequence parallel": layout.get("sequence_parallel"),
        "rounds": run.get("rounds"),
        "micro-batch tokens": settings.get("micro_batch_tokens"),
        "recompute": settings.get("recompute"),
        **run.get("versions", {}),
    }
    shown = [
        f"<span>{_text(key)} <b>{_text(more[key])}</b></span>"
        for key in more
        if more[key] is not None
    ]
    boxes = [
        f"<div><b>{_text(value)}</b><span>{_text(key)}</span></div>" for key, value in tiles.items()
    ]
    return f'<section class="tiles">{"".join(boxes)}</section><p class="facts">{"".join(shown)}</p>'


def _table(jobs: list[_Job], matched: bool) -> str:
    head = [
        "Job",
        "Status",
        "Steps",
        "Rank",
        "Last loss",
        "Eval loss",
        "Exact match",
        "Tokens",
        "Skipped",
    ]
    rows = []
    for job in jobs:
        cells = [_link(job), _status(job), _progress(job)]
        cells += [_text(job.fact("rank", job.config.get("lora", {}).get("rank")))]
        losses, evals = job.curve("loss")[1], job.curve("eval_loss")[1]
        cells += [_number(job.fact("last_loss", losses[-1] if len(losses) else None))]
        cells += [_before_after(job, "eval_loss", evals, _number)]
        cells += [_before_after(job, "exact_match", job.curve("eval_exact_match")[1], _percent)]
        cells += [f"{job.fact('tokens', int(job.curve('tokens')[1].sum())):,}"]
        cells += [
            _text(job.fact("skipped_steps", sum(bool(r.get("skipped")) for r in job.records)))
        ]
        rows.append(cells)
    drop = () if matched else (head.index("Exact match"),)
    lines = [
        "<tr>"
        + "".join(f"<{tag}>{c}</{tag}>" for i, c in enumerate(cells) if i not in drop)
        + "</tr>"
        for tag, cells in (("th", head), *(("td", row) for row in rows))
    ]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _legend(jobs: list[_Job]) -> str:
    return f'<p class="legend">{"".join(_link(job) for job in jobs)}</p>' if len(jobs) <= 16 else ""


def _link(job: _Job) -> str:
    swatch = f'<i class="swatch" style="background:{job.color}"></i>'
    return f'<a href="#job-{job.index}">{swatch}{_text(job.name)}</a>'


def _status(job: _Job) -> str:
    reason = job.fact("reason")
    note = f"<small>{_text(reason)}</small>" if reason else ""
    return f'<span class="chip {_text(job.status)}">{_text(job.status)}</span>{note}'


def _progress(job: _Job) -> str:
    done = job.fact("steps", job.last_step)
    total = job.fact("max_steps", job.config.get("max_steps"))
    share = min(100, 100 * done // total) if total else 0
    bar = f'<div class="bar"><div style="width:{share}%;background:{job.color}"></div></div>'
    return f"{done} / {_text(total)}{bar}"


def _before_after(job: _Job, name: str, values: np.ndarray, show: Callable[[Any], str]) -> str:
    before = job.fact(f"{name}_before", values[0] if len(values) else None)
    after = job.fact(f"{name}_after", values[-1] if len(values) > 1 else None)
    return f"{show(before)} → <b>{show(after)}</b>"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "—" if value is None else html.escape(str(value))


def _number(value: float | None) -> str:
    return "—" if value is None else _compact(value)


def _percent(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:.0f} %"


def _card(job: _Job, keys: list[str], style: _Style) -> str:
    """One job's panels under a line of what was asked of it."""
    lora, optimizer = job.config.get("lora", {}), job.config.get("optimizer", {})
    asked = {
        "rank": lora.get("rank"),
        "alpha": lora.get("alpha"),
        "dropout": lora.get("dropout"),
        "batch": job.config.get("batch_size"),
        "lr": optimizer.get("lr"),
        "schedule": job.config.get("schedule", {}).get("name"),
        "targets": ", ".join(lora.get("target_modules", ())) or None,
    }
    line = " · ".join(f"{key} {_text(value)}" for key, value in asked.items() if value is not None)
    panels = "".join(
        f"<figure><figcaption>{_TITLES[key]}</figcaption>{_panel(job, key, style)}</figure>"
        for key in keys
    )
    return (
        f'<section class="card" id="job-{job.index}" style="--job:{job.color}"><h3>{_link(job)}'
        f'{_status(job)}</h3><p>{line}</p><div class="panels">{panels}</div></section>'
    )


_AXES = ("tp", "pp", "cp", "dp")
_HEAD = """<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';style-src 'unsafe-inline'">
<style>
:root{color-scheme:light dark;--paper:#f6f7f9;--card:#fff;--text:#1b2430;--muted:#5d6878;
--grid:#e3e7ec;--bad:#c0392b;--good:#1e7d4f;--c0:#0072b2;--c1:#d98200;--c2:#009e73;--c3:#b8559a;
--c4:#3fa0dc;--c5:#c8500a;--c6:#6a4fb3;--c7:#7a7a20}
@media(prefers-color-scheme:dark){:root{--paper:#12161c;--card:#1b2129;--text:#e8ecf1;
--muted:#9aa6b5;--grid:#2e3742;--bad:#ff7b6b;--good:#5fd39b;--c0:#4aa3df;--c1:#f0a830;--c2:#2fc79a;
--c3:#e08cc8;--c4:#8fd0f5;--c5:#f4834a;--c6:#ab95ee;--c7:#c9c95a}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--text);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:1280px;margin:auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0}h2{font-size:17px;margin:34px 0 10px}h3{font-size:15px;margin:0}
p,small,figcaption,th,.none{color:var(--muted);font-size:13px}p{margin:2px 0 10px}
small{display:block;font-weight:400;white-space:normal;max-width:420px}
a{color:inherit;text-decoration:none}a:hover{text-decoration:underline}.bad{color:var(--bad)}
figure{margin:0;min-width:0}figure>svg{display:block;width:100%;height:auto;overflow:visible}
svg *{stroke-linejoin:round}.s path{fill:none}.s:hover path{stroke-width:4!important}
.tiles div,.card,.scroll,main>figure{background:var(--card);border:1px solid var(--grid);
border-radius:10px;padding:14px 16px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;
margin:18px 0 10px}.tiles b{display:block;font-size:24px;line-height:1.2}
.tiles span{color:var(--muted);font-size:13px}.facts,.legend{display:flex;flex-wrap:wrap;
gap:4px 18px}.facts b{color:var(--text);font-weight:500}.legend{margin:6px 0 0}
.scroll{overflow:auto;max-height:720px;padding:0 8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
th{position:sticky;top:0;background:var(--card);font-weight:500}tr:last-child td{border-bottom:0}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}
.swatch{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:8px}
.chip{font-size:13px;color:var(--muted)}.chip.finished{color:var(--good)}h3 .chip{margin-left:12px}
.chip.failed,.chip.rejected{color:var(--bad);font-weight:600}
.bar{height:4px;border-radius:2px;background:var(--grid);margin-top:3px;min-width:70px}
.bar div{height:4px;border-radius:2px}
.card{margin:0 0 12px;content-visibility:auto;contain-intrinsic-size:auto 270px}
.panels{display:grid;gap:10px 18px;grid-template-columns:repeat(var(--columns),minmax(0,1fr))}
.none{padding:36px 0;text-align:center}
@media(max-width:820px){.panels{grid-template-columns:repeat(auto-fit,
minmax(min(100%,var(--least)),1fr))}}
@media print{.scroll{max-height:none}}
</style>
"""
