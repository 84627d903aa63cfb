"""The bench of unlike replicas: LobRA's parts of it, and what its kept rows say."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from scripts.bench import lobra, replica_value
from tlora_megatron.planner.deploy.kinds import all_kinds
from tlora_megatron.planner.layouts import SearchSpace


def test_buckets_pad_least() -> None:
    found = lobra.buckets([10, 16, 100, 1000, 1001, 1008], most=3)
    assert found == [(16, 2), (112, 1), (1008, 3)]
    assert lobra.buckets([7] * 5) == [(16, 5)]
    many = lobra.buckets(range(1, 2000), most=7)
    assert len(many) == 7
    assert sum(bucket.count for bucket in many) == 1999


def test_a_deployment_by_lobras_rules_holds_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy.optimize")
    jobs = replica_value.jobs_of("lobra-like")
    space = SearchSpace(cp_size=1, recompute="none")
    args = replica_value.model_of("8b"), jobs, replica_value.machine_of("l40s"), 8
    types = lobra.pool(all_kinds(*args, space))
    assert all(kind.plan.cp_size == 1 and kind.plan.recompute == "none" for kind in types)
    step = lobra.buckets([500] * 300 + [3000] * 40 + [9000] * 4, most=4)
    found = lobra.plan(types, step, 8)
    assert found is not None
    assert sum(k.gpus * n for k, n in zip(found.types, found.counts, strict=True)) == 8
    assert max(kind.curve.budget for kind in found.types) >= 9000
    work = sum(
        bucket.count * min(k.gpus * lobra.sequence_s(k, bucket.rows) for k in types if
                           k.curve.budget >= bucket.rows)
        for bucket in step
    )  # fmt: skip
    assert found.time_s >= work / 8


@pytest.fixture(scope="module")
def kept(repo: Path) -> dict[tuple[str, str, str, str], dict[str, str]]:
    path = repo / "scripts/bench/results/replica_value.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["model"], row["cluster"], row["lengths"], row["planner"]): row for row in rows}


def test_every_case_has_every_planners_row(
    kept: dict[tuple[str, str, str, str], dict[str, str]],
) -> None:
    cases = {tuple(case.split(",")) for case in replica_value.CASES}
    assert {key[:3] for key in kept} == cases
    assert {key[3] for key in kept} == set(replica_value.PLANNERS)
    for (*case, _), row in kept.items():
        ours = kept[*case, "ours"]
        assert float(ours["bound_gpu_s"]) <= float(row["gpu_s"])
        assert float(ours["gpu_s"]) <= float(row["gpu_s"])


@pytest.mark.parametrize(
    ("case", "fewer"),
    [(("7b", "16xa100-40g", "lobra-like"), 0.25), (("8b", "8xl40s", "lobra-like"), 0.70)],
)
def test_ours_saves_what_it_must_over_all_jobs_on_tp8(
    kept: dict[tuple[str, str, str, str], dict[str, str]], case: tuple[str, str, str], fewer: float
) -> None:
    ours, tp8 = (float(kept[*case, name]["gpu_s"]) for name in ("ours", "tp8"))
    assert ours <= tp8 * (1 - fewer)
