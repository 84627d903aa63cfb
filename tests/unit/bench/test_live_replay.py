"""A service's controller, store and gangs end jobs when the simulator says: they are one system."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from scripts.bench.live_replay import compared
from tests.helpers.live_service import folder_in_memory
from tlora_megatron.sim.cluster import load_cluster
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import Trace, TraceRow
from tlora_megatron.sim.workload import load_mix


def _study(repo: Path) -> Study:
    """Forty jobs that a cluster of sixteen GPUs has some trouble with."""
    cluster, profile = load_cluster(repo / "configs/hardware/cluster-128xA100.yaml")
    mix, specs = load_mix("paper")
    random, now_s, rows = Random(1), 0.0, []
    for index in range(40):
        now_s += random.expovariate(1 / 500)
        rows.append(
            TraceRow(
                name=str(index),
                submit_s=now_s,
                duration_s=random.uniform(2000, 9000),
                num_gpus=random.choice((1, 1, 2, 4)),
            )
        )
    return Study(
        trace=Trace(name="forty", rows=tuple(rows), dropped={}), cluster=replace(cluster, nodes=2),
        profile=profile, mix=mix, specs=specs, options=Options(),
    )  # fmt: skip


def test_jobs_take_as_long_as_in_the_simulator(repo: Path) -> None:
    with folder_in_memory() as folder:
        # Other speeds than the planner's lead to other decisions, of which one study says nothing.
        found = compared(_study(repo), "tlora_elastic", folder / "service", noise=0.0)
    assert found["jobs"] == 40
    assert 0.95 < found["live over simulated"] < 1.05
