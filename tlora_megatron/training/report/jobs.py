"""Reads what a run's files say about its jobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tlora_megatron.page.svg import css_color
from tlora_megatron.training.metrics import METRICS_FILE, read_metrics

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
