"""A study as one HTML page with pictures, readable offline: no script, nothing loaded."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from tlora_megatron.page.head import page_head
from tlora_megatron.sim import charts
from tlora_megatron.sim.metrics import quantile
from tlora_megatron.sim.study import PolicyRun, Study

_SHOWN = 0.99
"""Pictures over time end when this share of the first policy's jobs have."""


def write_report(path: str | Path, study: Study, runs: Sequence[PolicyRun]) -> None:
    """Writes the page.

    Raises:
        ImportError: if matplotlib is missing.
        OSError: if the file cannot be written.
    """
    Path(path).write_text(_page(study, runs), encoding="utf-8")


def _page(study: Study, runs: Sequence[PolicyRun]) -> str:
    title = f"{study.trace.name} on {study.cluster.name}"
    css = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    until_s = _until_s(runs)
    pictures = {
        "Completion time": charts.completion_times(runs),
        "Slowdown while running": charts.slowdowns(runs),
        **charts.over_time(runs, until_s),
        "Group sizes": charts.group_sizes(runs),
    }
    num_gpus = study.cluster.shape.num_gpus
    lines = {run.policy: charts.gpu_time_line(run, num_gpus, until_s) for run in runs}
    return (
        f"{page_head(title, css)}<body><main><h1>{html.escape(title)}</h1>"
        f"<p>{_about(study)}</p><h2>Policies</h2>{_table(runs)}"
        f'<h2>Pictures</h2><div class="panels">{_figures(pictures)}</div>'
        f'<h2>What the GPUs do</h2><div class="wide">{_figures(lines)}</div>'
        "</main></body></html>\n"
    )


def _until_s(runs: Sequence[PolicyRun]) -> float:
    return quantile(sorted(record.end_s for record in runs[0].ledger.records), _SHOWN)


def _about(study: Study) -> str:
    options = study.options
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in study.trace.dropped.items())
    facts = [
        f"{len(study.workload.jobs):,} jobs" + (f" (left out: {dropped})" if dropped else ""),
        f"load {options.shape.load:g}x, {study.offered_load:.2f} of the GPUs' time asked for",
        f"attributes: {study.mix.name}",
        f"bound on slowdown {study.workload.jobs[0].max_slowdown:g}",
        f"GPUs as in profile {study.profile.name} ({study.profile.source})",
        f"seed {options.seed}",
    ]
    return html.escape("; ".join(facts))


def _table(runs: Sequence[PolicyRun]) -> str:
    head = ("policy", *COLUMNS)
    rows = ["".join(f"<th>{name}</th>" for name in head)]
    for place, run in enumerate(runs):
        color = charts.COLORS[place % len(charts.COLORS)]
        swatch = f'<i class="swatch" style="background:{color}"></i>'
        cells = "".join(f"<td>{cell}</td>" for cell in cells_of(run, runs[0]))
        rows.append(f"<td>{swatch}{html.escape(run.policy)}</td>{cells}")
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table>{body}</table></div>'


COLUMNS = (
    *("mean JCT", "against first", "p50", "p95", "p99", "queueing", "tokens/s", "against first"),
    *("utilisation", "GPUs held", "slowdown max", "jobs a group", "finished", "makespan"),
)
"""Of the table here and on the terminal, after the policy's name."""


def cells_of(run: PolicyRun, first: PolicyRun) -> tuple[str, ...]:
    """A policy's row of the table; `first` is what it is compared with."""
    s, base = run.summary, first.summary
    return (
        _hours(s.mean_jct_s),
        _times(base.mean_jct_s, s.mean_jct_s),
        _hours(s.p50_jct_s),
        _hours(s.p95_jct_s),
        _hours(s.p99_jct_s),
        _hours(s.mean_queueing_s),
        f"{s.throughput_tokens_per_s:,.0f}",
        _times(s.throughput_tokens_per_s, base.throughput_tokens_per_s),
        f"{s.gpu_utilisation:.1%}",
        f"{s.gpu_allocation:.1%}",
        f"{s.max_slowdown:.2f}",
        f"{s.mean_group_size:.2f}",
        f"{s.jobs_finished:,}",
        _hours(s.makespan_s),
    )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 360 else f"{seconds:,.0f} s"


def _times(value: float, by: float) -> str:
    return f"{value / by:.2f}x" if by else "-"


def _figures(pictures: dict[str, str]) -> str:
    return "".join(
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>"
        for title, svg in pictures.items()
    )
