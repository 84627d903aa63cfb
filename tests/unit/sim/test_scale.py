"""A real cluster's jobs: four weeks under one policy, a week under each of the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tlora_megatron.scheduler.registry import POLICIES
from tlora_megatron.sim.cluster_config import load_cluster
from tlora_megatron.sim.job_mix import load_mix
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import read_trace

WEEK_S = 7 * 24 * 3600.0


@pytest.fixture(scope="module")
def study_of(repo: Path, shared_data: Path) -> Callable[[int], Study]:
    """The jobs of the first weeks of the trace, ready to run."""
    cluster, profile = load_cluster(repo / "configs" / "hardware" / "cluster-128xA100.yaml")
    mix, specs = load_mix("paper")
    whole = read_trace(shared_data / "traces" / "philly_4w_20171002.csv.gz")

    @functools.cache
    def make(weeks: int) -> Study:
        rows = tuple(row for row in whole.rows if row.submit_s < weeks * WEEK_S)
        return Study(
            trace=replace(whole, rows=rows),
            cluster=cluster,
            profile=profile,
            mix=mix,
            specs=specs,
            options=Options(),
        )

    return make


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("policy", POLICIES)
def test_philly_runs_to_its_end(study_of: Callable[[int], Study], policy: str) -> None:
    weeks, jobs = (4, 56_848) if policy == "tlora" else (1, 13_380)
    study = study_of(weeks)
    run = study.run(policy)
    assert run.summary.jobs_finished == len(study.workload.jobs) == jobs


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
