"""Four weeks of a real cluster's jobs under each policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlora_megatron.scheduler.registry import POLICIES
from tlora_megatron.sim.cluster_config import load_cluster
from tlora_megatron.sim.job_mix import load_mix
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import read_trace


@pytest.fixture(scope="module")
def study(repo: Path, shared_data: Path) -> Study:
    cluster, profile = load_cluster(repo / "configs" / "hardware" / "cluster-128xA100.yaml")
    mix, specs = load_mix("paper")
    trace = read_trace(shared_data / "traces" / "philly_4w_20171002.csv.gz")
    return Study(
        trace=trace, cluster=cluster, profile=profile, mix=mix, specs=specs, options=Options()
    )


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("policy", POLICIES)
def test_philly_runs_to_its_end(study: Study, policy: str) -> None:
    run = study.run(policy)
    assert run.summary.jobs_finished == len(study.workload.jobs) == 56_848  # 6 have no duration


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
