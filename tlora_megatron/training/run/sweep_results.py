"""What a sweep has found: its trials from best to worst, as values, a file and a part of a page."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora_megatron.config.rungs import ranked
from tlora_megatron.config.sections import plain
from tlora_megatron.config.sweep import Sweep, settings_text
from tlora_megatron.files import BY_UMASK, write_atomic
from tlora_megatron.page import MUTED, compact, draw, paint_color, panels, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_TICKS = 8
_AFTER = {"eval_loss": "eval_loss_after", "eval_exact_match": "exact_match_after"}


def sweep_results(
    sweep: Sweep, rungs: Sequence[Mapping[str, Any]], jobs: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns a sweep's trials from best to worst, those that have gone further first.

    Args:
        rungs: as `Halving.document` gives them.
        jobs: of the run's summary.
    """
    spec = sweep.spec
    rows: dict[str, dict[str, Any]] = {}
    for name, settings in sweep.settings.items():
        job = jobs.get(name, {})
        scores = [rung["scores"].get(name) for rung in rungs if name in rung["scores"]]
        end = _end_score(spec.metric, job) if job.get("status") == "finished" else None
        rows[name] = {
            "trial": name,
            "settings": dict(settings),
            "status": job.get("status", "left out"),
            "reason": job.get("reason"),
            "steps": job.get("steps", 0),
            "max_steps": job.get("max_steps"),
            "tokens": job.get("tokens", 0),
            "rung_scores": scores,
            "value": end if job.get("status") == "finished" else (scores or [None])[-1],
            "adapter": job.get("adapter"),
        }
    order: list[str] = []
    depths = {n: (row["status"] == "finished", len(row["rung_scores"])) for n, row in rows.items()}
    for depth in sorted(set(depths.values()), reverse=True):
        own = {n: _known(rows[n]["value"]) for n in rows if depths[n] == depth}
        order += ranked(own, prefers_more=spec.prefers_more)
    done = [n for n in order if depths[n][0] and math.isfinite(_known(rows[n]["value"]))]
    asked = sum(row["max_steps"] or 0 for row in rows.values())
    stopped = [row for row in rows.values() if row["status"] == "cancelled" and row["max_steps"]]
    saved = sum(row["max_steps"] - row["steps"] for row in stopped)
    return {
        "metric": spec.metric,
        "best": rows[done[0]] if done else None,
        "steps_saved": saved / asked if asked else None,
        "ranking": [rows[name] for name in order],
    }


def _end_score(metric: str, job: Mapping[str, Any]) -> float | None:
    if metric in _AFTER:
        return job.get(_AFTER[metric])
    return (job.get("scores_after") or {}).get(metric.removeprefix("eval_"))


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def write_table(output_dir: Path, results: Mapping[str, Any]) -> None:
    """Writes `OUT/sweep.csv`: a row a trial, from best to worst, with a column for each setting."""
    ranking = results["ranking"]
    keys = list(dict.fromkeys(key for row in ranking for key in row["settings"]))
    most = max((len(row["rung_scores"]) for row in ranking), default=0)
    rung_columns = [f"rung_{number}" for number in range(1, most + 1)]
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    head = ("place", "trial", *keys, "status", "steps", "max_steps", "tokens")
    lines.writerow([*head, *rung_columns, results["metric"], "adapter", "reason"])
    for place, row in enumerate(ranking, start=1):
        own = (row[key] for key in ("status", "steps", "max_steps", "tokens"))
        scores = [*row["rung_scores"], *[None] * (most - len(row["rung_scores"]))]
        settings = (plain(row["settings"].get(key)) for key in keys)
        end = (row["value"], row["adapter"], row["reason"])
        lines.writerow([place, row["trial"], *settings, *own, *scores, *end])
    write_atomic(output_dir / "sweep.csv", text.getvalue(), mode=BY_UMASK)


def sweep_section(results: Mapping[str, Any], links: Mapping[str, str]) -> str:
    """The part of the report that shows a sweep, as HTML.

    Args:
        links: of the trials' names, as HTML.
    """
    metric, best, ranking = results["metric"], results["best"], results["ranking"]
    found = "<p>no trial has finished with a value</p>"
    if best is not None:
        folder = f"jobs/{html.escape(best['trial'])}/adapter"
        told = html.escape(f"{settings_text(best['settings'])}: {metric} {compact(best['value'])}")
        found = (
            f"<p>best: {links.get(best['trial'], '')} {told} · "
            f'<a href="{folder}">its adapter</a></p>'
        )
    keys = list(dict.fromkeys(key for row in ranking for key in row["settings"]))
    rows = [
        [
            str(place),
            links.get(row["trial"], html.escape(row["trial"])),
            *(html.escape(_shown(row["settings"].get(key))) for key in keys),
            _shown(row["value"]),
            f"{row['steps']} / {row['max_steps']}",
            html.escape(row["reason"] or row["status"]),
        ]
        for place, row in enumerate(ranking, start=1)
    ]
    dots = {key: _dots(key, metric, ranking, f"sweep-{n}") for n, key in enumerate(keys)}
    note = "<p>Dots: trials; grey: stopped early, with the value at their last rung.</p>"
    return (
        f"<h2>Sweep</h2>{found}{panels(dots, columns=min(3, len(dots)), least_px=300)}{note}"
        f"{table(['', 'Trial', *keys, metric, 'Steps', 'End'], rows, num_words=2)}"
    )


def _dots(key: str, metric: str, ranking: Sequence[Mapping[str, Any]], salt: str) -> str:
    """Draws the trials' values over those of a setting, which are names if some is no number."""
    points = [
        (row["settings"][key], row["value"], row["status"] == "finished")
        for row in reversed(ranking)
        if key in row["settings"] and row["value"] is not None
    ]
    if not points:
        return '<div class="none">no values</div>'
    is_number = all(type(x) in (int, float) for x, _, _ in points)
    names = list(dict.fromkeys(_shown(x) for x, _, _ in points))

    def paint(axes: Axes) -> None:
        for is_done, color in ((False, MUTED), (True, paint_color(0))):
            own = [point for point in points if point[2] == is_done]
            xs = [x if is_number else names.index(_shown(x)) for x, _, _ in own]
            ys = [y for _, y, _ in own]
            axes.plot(xs, ys, color=color, marker="o", markersize=6, linestyle="none")
        places = sorted({x if is_number else names.index(_shown(x)) for x, _, _ in points})
        if is_number and places[0] > 0 and places[-1] >= 8 * places[0]:
            axes.set_xscale("log")
        elif len(places) > _MOST_TICKS:  # whole numbers alone would be marked
            step = (places[-1] - places[0]) / (_MOST_TICKS - 1)
            places = [places[0] + step * number for number in range(_MOST_TICKS)]
        if len(places) <= _MOST_TICKS:
            axes.set_xticks(places, [compact(x) for x in places] if is_number else names)
        values = [y for _, y, _ in points]
        if min(values) > 0 and max(values) > 30 * min(values):
            axes.set_yscale("log")

    return draw((4.2, 2.4), salt, paint)


def _shown(value: Any) -> str:
    if type(value) in (int, float):
        return compact(value)
    return "—" if value is None else str(value)
