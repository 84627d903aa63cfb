"""Writes `OUT/report.html`: one page with every job's curves and results, readable offline."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from tlora_megatron.files import BY_UMASK, read_object, write_atomic
from tlora_megatron.page import (
    NUM_COLORS,
    compact,
    css_color,
    document,
    facts,
    legend,
    panels,
    swatch,
    table,
    tiles,
)
from tlora_megatron.timeline import time_line
from tlora_megatron.training.nano.trace import read_trace
from tlora_megatron.training.run.curves import (
    SMOOTH_ABOVE,
    Curve,
    PanelStyle,
    ReportJob,
    has_dots,
    overview,
    panel,
    read_jobs,
    scatter,
)
from tlora_megatron.training.run.sweep_results import sweep_section

_TITLES = {
    "loss": "Loss",
    "eval_exact_match": "Exact match",
    "grad_norm": "Gradient norm before clipping",
    "lr": "Learning rate",
}
_READING = f"""<p>Lines: training, over the job's own optimizer steps; above {SMOOTH_ABOVE} steps
loss and gradient norm are smoothed, with the raw values behind. Dots: evaluation.
<b class="bad">Ticks</b> at the bottom: update skipped or value not finite.</p>"""
_Draw = Callable[[ReportJob, str, PanelStyle], str]
_AXES = ("tp", "pp", "cp", "dp")
_MISSING = "—"


class Report:
    """A run's page, whose curves can be drawn on a thread before its summary is known."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = Path(output_dir)
        self._drawn: dict[tuple[Any, ...], str] = {}
        self._thread: threading.Thread | None = None

    def draw_beside(self) -> None:
        """Draws the curves of the metrics written so far, beside what the caller does."""
        self._thread = threading.Thread(target=self._draw, name="report")
        self._thread.start()

    def write(self) -> Path:
        """Writes `OUT/report.html` from config.json, summary.json and metrics; returns its path.

        It may be called while the run goes on; files that do not exist yet count as empty.

        Raises:
            ImportError: if matplotlib is missing.
            ValueError: if a file of the run is corrupt.
        """
        if self._thread is not None:
            self._thread.join()
        path = self._output_dir / "report.html"
        write_atomic(path, self._page(), mode=BY_UMASK)
        return path

    def _draw(self) -> None:
        if (self._output_dir / "sweep.json").is_file():
            return  # of many trials few are shown, and the summary says which
        # What is wrong is said by `write`.
        with suppress(ImportError, OSError, ValueError):
            self._page()

    def _page(self) -> str:
        folder = self._output_dir
        files = (read_object(folder / f"{name}.json") for name in ("config", "summary"))
        config, summary = (found or {} for found in files)
        jobs = read_jobs(folder, config, summary)
        run = summary.get("run", {})
        keys = [key for key in _TITLES if _is_matched(jobs) or key != "eval_exact_match"]
        style = PanelStyle.for_jobs(jobs)
        # Of a sweep's trials, which may be many, those that were stopped have a row and a curve.
        shown = [job for job in jobs if "sweep" not in summary or job.status != "cancelled"]
        cards = "".join(_card(job, keys, style, self._panel) for job in shown)
        sweep = ""
        if "sweep" in summary:
            sweep = sweep_section(summary["sweep"], {job.name: _link(job) for job in shown})
        written = time.strftime("%Y-%m-%d %H:%M %Z")
        return document(
            folder.resolve().name,
            f"{_outcome(run, jobs)} · written {written}",
            f"{tiles(_main_numbers(config, run, jobs))}{facts(_facts(config, run))}"
            f"{_times(run)}{sweep}<h2>Jobs</h2>{_table(shown)}{_together(jobs, style)}"
            f"<h2>Curves by job</h2>{_READING}{cards}{_nano_section(folder)}",
        )

    def _panel(self, job: ReportJob, key: str, style: PanelStyle) -> str:
        name = (job.index, job.name, len(job.records), key, style)
        if name not in self._drawn:
            self._drawn[name] = panel(job, key, style)
        return self._drawn[name]


def _outcome(run: dict[str, Any], jobs: list[ReportJob]) -> str:
    """How the run stands, in a few words that hide no job that failed."""
    states = {job.status for job in jobs}
    if not run:
        return "in progress"
    if states <= {"finished"}:
        return "finished"
    has_left = not states.isdisjoint(("running", "waiting"))
    return f"{'stopped' if has_left else 'ended'}: {_counts(jobs)}"


def _counts(jobs: list[ReportJob]) -> str:
    states = [job.status for job in jobs]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _is_matched(jobs: list[ReportJob]) -> bool:
    return any(len(job.curve("eval_exact_match")[0]) for job in jobs)


def _together(jobs: list[ReportJob], style: PanelStyle) -> str:
    """All jobs' losses in one drawing; empty for one job, whose card shows the same."""
    if len(jobs) < 2 or not any(len(job.curve("loss")[0]) for job in jobs):
        return ""
    links = "".join(map(_link, jobs))
    dots = "<span>dots: evaluation</span>" if has_dots(jobs) else ""
    legend = f'<p class="legend">{links}{dots}</p>' if len(jobs) <= 16 else ""
    return f"<h2>Training loss</h2><figure>{overview(jobs, style)}{legend}</figure>"


def _layout(config: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    return dict(run.get("layout") or config.get("parallel", {}))


def _main_numbers(
    config: dict[str, Any], run: dict[str, Any], jobs: list[ReportJob]
) -> dict[str, str]:
    layout = _layout(config, run)
    sizes = {axis: layout.get(f"{axis}_size") for axis in _AXES}
    shape = " · ".join(f"{axis.upper()} {size}" for axis, size in sizes.items() if size)
    wall, rate = run.get("wall_time_s"), run.get("tokens_per_s")
    since = " since it was continued" if run.get("resumed") else ""
    return {
        f"tokens per second{since}": _MISSING if rate is None else f"{rate:,.0f}",
        f"jobs ({_counts(jobs)})": str(len(jobs)),
        f"processes ({shape or 'layout not known yet'})": _plain(run.get("world_size")),
        f"wall time{since}": _MISSING if wall is None else str(timedelta(seconds=round(wall))),
    }


def _facts(config: dict[str, Any], run: dict[str, Any]) -> dict[str, str]:
    """Everything else that is known about the run."""
    base, settings = config.get("base_model", {}), config.get("run", {})
    known = {
        "base model": base.get("path") or base.get("config"),
        "dtype": base.get("dtype"),
        "quantization": run.get("quantization"),
        "replicas": run.get("replicas"),
        "sequence parallel": _layout(config, run).get("sequence_parallel"),
        "rounds": run.get("rounds"),
        "micro-batch tokens": settings.get("micro_batch_tokens"),
        "recompute": run.get("recompute") or settings.get("recompute"),
        "nano-batches": settings.get("nano_batches"),
        **run.get("versions", {}),
    }
    return {name: _plain(value) for name, value in known.items() if value is not None}


def _times(run: dict[str, Any]) -> str:
    """The line that says where the time went; empty while the run goes on."""
    times = time_line(run)
    return f'<p class="facts">{html.escape(f"time: {times}")}</p>' if times else ""


def _table(jobs: list[ReportJob]) -> str:
    hidden = set() if _is_matched(jobs) else {"Exact match"}
    if not any(job.fact("truncated_sequences", 0) for job in jobs):
        hidden.add("Rows cut")
    shown = [name for name in _COLUMNS if name not in hidden]
    rows = ([_COLUMNS[name](job) for name in shown] for job in jobs)
    return table(shown, rows, num_words=2)


def _link(job: ReportJob) -> str:
    return f'<a href="#job-{job.index}">{swatch(job.color)}{_text(job.name)}</a>'


def _status(job: ReportJob) -> str:
    reason = job.fact("reason")
    note = f"<small>{_text(reason)}</small>" if reason else ""
    return f'<span class="chip {_text(job.status)}">{_text(job.status)}</span>{note}'


def _progress(job: ReportJob) -> str:
    done = job.fact("steps", job.last_step)
    total = job.fact("max_steps", job.config.get("max_steps"))
    share = min(100, 100 * done // total) if total else 0
    bar = f'<div class="bar"><div style="width:{share}%;background:{job.color}"></div></div>'
    return f"{done} / {_text(total)}{bar}"


def _before_after(job: ReportJob, name: str, values: np.ndarray, show: Callable[[Any], str]) -> str:
    before = job.fact(f"{name}_before", values[0] if len(values) else None)
    after = job.fact(f"{name}_after", values[-1] if len(values) > 1 else None)
    return f"{show(before)} → <b>{show(after)}</b>"


def _rank(job: ReportJob) -> str:
    lora = job.config.get("lora", {})
    rank, blocks = (job.fact(key, lora.get(key)) for key in ("rank", "num_blocks"))
    return _text(rank) + (f" / {blocks} blocks" if blocks and blocks > 1 else "")


def _last_loss(job: ReportJob) -> str:
    losses = job.curve("loss")[1]
    return _number(job.fact("last_loss", losses[-1] if len(losses) else None))


_COLUMNS: dict[str, Callable[[ReportJob], str]] = {
    "Job": _link,
    "Status": _status,
    "Steps": _progress,
    "Rank": _rank,
    "Last loss": _last_loss,
    "Eval loss": lambda job: _before_after(job, "eval_loss", job.curve("eval_loss")[1], _number),
    "Exact match": lambda job: _before_after(
        job, "exact_match", job.curve("eval_exact_match")[1], _percent
    ),
    "Tokens": lambda job: f"{job.fact('tokens', int(job.curve('tokens')[1].sum())):,}",
    "Rows cut": lambda job: _text(job.fact("truncated_sequences")),
    "Skipped": lambda job: _text(
        job.fact("skipped_steps", sum(bool(r.get("skipped")) for r in job.records))
    ),
}


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return _MISSING if value is None else str(value)


def _text(value: Any) -> str:
    return html.escape(_plain(value))


def _number(value: float | None) -> str:
    return _MISSING if value is None else compact(value)


def _percent(value: float | None) -> str:
    return _MISSING if value is None else f"{100 * value:.0f} %"


def _card(job: ReportJob, keys: list[str], style: PanelStyle, draw: _Draw) -> str:
    """One job's curves under a line with its settings."""
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
    pictures = {_TITLES[key]: draw(job, key, style) for key in keys}
    columns, least_px = (2, 420) if style.is_large else (len(keys), 240)
    return (
        f'<section class="card" id="job-{job.index}" style="--job:{job.color}"><h3>{_link(job)}'
        f"{_status(job)}</h3><p>{line}</p>"
        f"{panels(pictures, columns=columns, least_px=least_px)}</section>"
    )


def _nano_section(output_dir: Path) -> str:
    """Step times by number of nano-batches; empty if the run did not choose its number."""
    lines = read_trace(output_dir)
    if not lines:
        return ""
    curves: dict[int, Curve] = {}
    counts = sorted({line.nano_batches for line in lines})
    colors = {count: (count - 1) % NUM_COLORS for count in counts}
    for count, color in colors.items():
        mine = [line for line in lines if line.nano_batches == count and line.tokens]
        steps = np.array([line.step for line in mine], dtype=float)
        curves[color] = steps, np.array([1e6 * line.time_s / line.tokens for line in mine])
    names = legend({str(count): css_color(color) for count, color in colors.items()})
    return (
        "<h2>Nano-batches</h2><p>Milliseconds per thousand tokens over the measured steps, by the "
        f"number of nano-batches; kept at the end: <b>{lines[-1].kept}</b></p>"
        f"<figure>{scatter(curves)}{names}</figure>"
    )
