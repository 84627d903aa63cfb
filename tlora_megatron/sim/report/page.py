"""Writes a study as one HTML page with pictures, readable offline."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from tlora_megatron.page.document import document, facts, legend, panels, swatch, table
from tlora_megatron.page.svg import css_color
from tlora_megatron.sim.metrics import quantile
from tlora_megatron.sim.report import charts
from tlora_megatron.sim.study import PolicyRun, Study, Yardsticks

_SHOWN = 0.99
"""Pictures over time end when this share of the first policy's jobs have ended."""


def write_report(
    path: str | Path, study: Study, runs: Sequence[PolicyRun], yardsticks: Yardsticks | None
) -> None:
    """Writes the page of a study.

    Raises:
        ImportError: if matplotlib is missing.
        OSError: if the file cannot be written.
    """
    Path(path).write_text(_page(study, runs, yardsticks), encoding="utf-8")


def _page(study: Study, runs: Sequence[PolicyRun], yardsticks: Yardsticks | None) -> str:
    until_s = _until_s(runs)
    pictures = {
        "Completion time": charts.completion_times(runs),
        "Slowdown while running": charts.slowdowns(runs),
        **charts.over_time(runs, until_s),
        "Group sizes": charts.group_sizes(runs),
    }
    num_gpus = study.cluster.shape.num_gpus
    lines = {run.policy: charts.gpu_time_line(run, num_gpus, until_s) for run in runs}
    colors = {run.policy: css_color(place) for place, run in enumerate(runs)}
    return document(
        f"{study.trace.name} on {study.cluster.name}",
        f"{len(study.workload.jobs):,} jobs; policies are compared with {runs[0].policy}",
        f"{facts(_facts(study))}<h2>Policies</h2>{_table(runs, yardsticks)}"
        f"<h2>Pictures</h2>{legend(colors)}{panels(pictures, columns=2, least_px=480)}"
        f"<h2>What the GPUs do</h2>{panels(lines, columns=1, least_px=480)}",
    )


def _until_s(runs: Sequence[PolicyRun]) -> float:
    return quantile(sorted(record.end_s for record in runs[0].ledger.records), _SHOWN)


def _facts(study: Study) -> dict[str, str]:
    options = study.options
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in study.trace.dropped.items())
    return {
        "offered load": f"{study.offered_load:.2f}",
        "attributes": study.mix.name,
        "bound on slowdown": f"{study.workload.jobs[0].max_slowdown:g}",
        "GPU profile": f"{study.profile.name} ({study.profile.source})",
        "seed": str(options.seed),
        **({"left out": left_out} if left_out else {}),
    }


def _table(runs: Sequence[PolicyRun], yardsticks: Yardsticks | None) -> str:
    rows = [
        (f"{swatch(css_color(place))}{html.escape(run.policy)}", *cells_of(run, runs[0]))
        for place, run in enumerate(runs)
    ]
    rows += [] if yardsticks is None else yardstick_rows(yardsticks, runs[0])
    return table(("policy", *COLUMNS), rows)


COLUMNS = (
    *("mean JCT", "against first", "p50", "p95", "p99", "queueing", "tokens/s", "against first"),
    *("utilisation", "GPUs held", "slowdown max", "jobs a group", "finished", "makespan"),
)
"""Columns of the table here and on the terminal, after the policy's name."""


def cells_of(run: PolicyRun, first: PolicyRun) -> tuple[str, ...]:
    """The cells of a policy's row; `first` is the policy that it is compared with."""
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


def yardstick_rows(yardsticks: Yardsticks, first: PolicyRun) -> list[tuple[str, ...]]:
    """Rows below those of the policies; they have a mean completion time only."""
    base_s = first.summary.mean_jct_s
    named = {
        "malleable SRPT, est.": yardsticks.malleable_jct_s,
        "no policy beats": yardsticks.least_jct_s,
    }
    rest = ("",) * (len(COLUMNS) - 2)
    return [(name, _hours(jct_s), _times(base_s, jct_s), *rest) for name, jct_s in named.items()]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 360 else f"{seconds:,.0f} s"


def _times(value: float, by: float) -> str:
    return f"{value / by:.2f}x" if by else "-"
