"""A real cluster's jobs under every policy: a part of a week's, and those of a crowded day."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tlora_megatron.scheduler.registry import POLICIES
from tlora_megatron.sim.cluster import load_cluster
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import TraceShape, read_trace
from tlora_megatron.sim.workload import load_mix

DAY_S = 24 * 3600.0
PARTS = {
    # Fewer jobs meet as many moments of quiet and of crowds as all 13,380 of the week.
    "a tenth of a week": (0, 7, TraceShape(sample=0.1)),
    "a crowded day": (2, 3, TraceShape(most_jobs=1500)),
}
"""First day, day behind the last, and which of their jobs; the second part asks for ten times the
GPUs that there are."""


@pytest.fixture(scope="module")
def study_of(repo: Path, shared_data: Path) -> Callable[[str], Study]:
    """The jobs of a part of the trace, ready to run."""
    cluster, profile = load_cluster(repo / "configs" / "hardware" / "cluster-128xA100.yaml")
    mix, specs = load_mix("paper")
    whole = read_trace(shared_data / "traces" / "philly_4w_20171002.csv.gz")

    @functools.cache
    def make(part: str) -> Study:
        first, end, shape = PARTS[part]
        rows = tuple(row for row in whole.rows if first * DAY_S <= row.submit_s < end * DAY_S)
        return Study(
            trace=replace(whole, rows=rows),
            cluster=cluster,
            profile=profile,
            mix=mix,
            specs=specs,
            options=Options(shape=shape),
        )

    return make


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(("part", "jobs"), list(zip(PARTS, (1324, 1500), strict=True)))
@pytest.mark.parametrize("policy", POLICIES)
def test_philly_runs_to_its_end(
    study_of: Callable[[str], Study], policy: str, part: str, jobs: int
) -> None:
    study = study_of(part)
    run = study.run(policy)
    assert run.summary.jobs_finished == len(study.jobs) == jobs


@pytest.mark.shared
@pytest.mark.parametrize(
    ("file", "jobs", "dropped"),
    [
        ("philly_4w_20171002", 56_848, {"no duration": 6}),
        ("alibaba_lingjun2023_16d", 2_257, {"no duration": 241}),
        ("acme_kalos_completed_nonEval_90d", 319, {}),
    ],
)
def test_shared_traces_are_read(
    shared_data: Path, file: str, jobs: int, dropped: dict[str, int]
) -> None:
    trace = read_trace(shared_data / "traces" / f"{file}.csv.gz")
    assert (len(trace.rows), trace.dropped) == (jobs, dropped)
