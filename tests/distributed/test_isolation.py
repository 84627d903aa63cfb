"""A job's arithmetic does not depend on co-trained jobs, whatever becomes of them.

All runs of one world size share one set of processes; each is a whole `train_run`, checked by the
files it leaves, its log, and the events of its loop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.isolation import (
    CASES,
    GROUPINGS,
    IN_NANO_BATCHES,
    INCIDENTS,
    INCIDENTS_OF,
    LAYOUTS,
    NAMES,
    NANO_INCIDENT,
    NUM_STEPS,
    Incident,
    make_cases,
)
from tests.helpers.scenario import (
    assert_same_bits,
    exported,
    losses,
    oracle_of,
    records,
    summary_of,
)
from tests.helpers.scenario_worlds import Case, World, worlds

INCIDENT_RUNS = [
    *(pytest.param(1, "", name, id=f"one process, {name}") for name in INCIDENTS),
    *(pytest.param(2, f"{layout} ", name,
      id=f"{layout}, {name}") for layout in LAYOUTS for name in INCIDENTS_OF[layout]),
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("isolation")
    make_cases(root)
    return root


@pytest.fixture(scope="module")
def run_world(root: Path) -> World:
    return worlds(root, lambda size: {n: Case(root / f"{n}.json") for n in CASES[size]})


def told(output_dir: Path, name: str, key: str) -> list[dict[str, Any]]:
    entries = json.loads((output_dir / "events.json").read_text())
    return [entry for entry in entries if entry["name"] == name and key in entry]


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_a_job_alone_equals_the_job_in_any_company(grouping: str, run_world: World) -> None:
    out = run_world(1)
    for name in GROUPINGS[grouping].get("jobs", NAMES):
        expected = losses(out / "together", name)
        assert len(expected) == NUM_STEPS
        assert losses(out / grouping, name) == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_drops_the_same_elements(layout: str, run_world: World) -> None:
    one, two = run_world(1), run_world(2)
    for name in NAMES:
        expected = losses(one / "together", name)
        actual = losses(two / f"{layout} together", name)
        assert actual == pytest.approx(expected, rel=1e-5), name


def test_dropout_is_on_in_these_runs(run_world: World) -> None:
    out = run_world(1)
    for name in NAMES:
        dropped, whole = (losses(out / case, name) for case in ("together", "no dropout"))
        # A fresh adapter's B is zero, so its first loss cannot tell; any one step may lie close.
        assert dropped[1:] != pytest.approx(whole[1:], rel=1e-3), name


@pytest.mark.parametrize(("world_size", "layout", "name"), INCIDENT_RUNS)
def test_others_keep_their_bits(world_size: int, layout: str, name: str, run_world: World) -> None:
    out = run_world(world_size)
    healthy, ill = out / f"{layout}together", out / f"{layout}{name}"
    for other in NAMES:
        if other == INCIDENTS[name].job:
            continue
        assert len(losses(ill, other)) == NUM_STEPS
        assert summary_of(ill)["jobs"][other]["status"] == "finished"
        assert_same_bits(ill, healthy, other)


def test_an_evaluation_hangs_on_no_other_job_where_sequences_are_divided(run_world: World) -> None:
    out = run_world(2)
    alone, beside = (
        records(out / f"CP2 evaluated {how}", "everything")[0]
        for how in ("alone", "beside another")
    )
    assert alone["step"] == 0
    assert alone == beside


@pytest.mark.parametrize(("world_size", "layout", "name"), INCIDENT_RUNS)
def test_bad_steps_are_marked(world_size: int, layout: str, name: str, run_world: World) -> None:
    output_dir, incident = run_world(world_size) / f"{layout}{name}", INCIDENTS[name]
    steps = [r for r in records(output_dir, incident.job) if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, incident.steps + 1))
    good, bad = steps[: -incident.bad_steps], steps[-incident.bad_steps :]
    assert not any("skipped" in r or "nonfinite" in r for r in good)
    for record in bad:
        assert record["skipped"] is True
        assert record["nonfinite"] is True
        assert record["loss"] is None or record["grad_norm"] is None
    summary = summary_of(output_dir)["jobs"][incident.job]
    assert (summary["steps"], summary["skipped_steps"]) == (incident.steps, incident.bad_steps)


@pytest.mark.parametrize(("world_size", "layout", "name"), INCIDENT_RUNS)
def test_an_incident_ends_by_the_job_s_own_policy_and_with_its_name(
    world_size: int, layout: str, name: str, run_world: World
) -> None:
    out, incident = run_world(world_size), INCIDENTS[name]
    output_dir = out / f"{layout}{name}"
    summary = summary_of(output_dir)["jobs"][incident.job]
    events = [entry["event"] for entry in told(output_dir, incident.job, "event")]
    assert len(events) == incident.bad_steps + incident.never_moves
    skips, reason = events, None
    if incident.fails:
        *skips, end = events
        reason = expected_reason(incident)
        assert summary["reason"].startswith(reason)
        assert end == f"failed: {summary['reason']}"
        assert not (output_dir / "jobs" / incident.job / "adapter").exists()
    assert summary["status"] == ("failed" if incident.fails else "finished")
    assert (summary["adapter"] is None) == incident.fails
    first = incident.steps - incident.bad_steps + 1
    for step, event in enumerate(skips, start=first):
        assert event.startswith(f"update skipped at step {step}: loss ")
    log = (out / "log.txt").read_text()
    for event in events:
        assert f"job {incident.job}: {event}" in log


def expected_reason(incident: Incident) -> str:
    if incident.never_moves:
        return f"none of its {NUM_STEPS} updates could be applied"
    if incident.run:
        rows = incident.run["max_nonfinite_steps"]
        return f"not finite for {rows} steps, last at step {incident.steps}: loss "
    return f"not finite at step {incident.steps}: loss "


def test_skipped_updates_leave_the_adapter_as_it_was(run_world: World) -> None:
    folder = run_world(1) / "poisoned, skip" / "jobs" / "outputs" / "checkpoints"
    factors = load_file(folder / f"step_{NUM_STEPS - 1:08d}" / "adapter.safetensors")
    assert all((factor == torch.tensor(1e38)).all() for factor in factors.values())


def test_jobs_go_at_their_own_pace_and_leave_when_done(run_world: World) -> None:
    output_dir = run_world(1) / "uneven"
    rounds = {n: [t["round"] for t in told(output_dir, n, "step")] for n in NAMES}
    assert {name: len(steps) for name, steps in rounds.items()} == {
        "attention": NUM_STEPS,
        "mlp": 4,
        "everything": 8,
        "outputs": NUM_STEPS,
    }
    last = {name: steps[-1] for name, steps in rounds.items()}
    assert last["mlp"] < last["attention"] < last["everything"] < last["outputs"]
    assert last["outputs"] == summary_of(output_dir)["run"]["rounds"]
    # Jobs take turns: none waits until another is done.
    assert max(steps[0] for steps in rounds.values()) < last["attention"]
    # Those that left have made room: the last three steps take fewer rounds than the first three.
    steps = rounds["outputs"]
    assert steps[-1] - steps[-4] < steps[3] - steps[0]


def test_epochs_end_with_what_is_left(root: Path, run_world: World) -> None:
    output_dir, oracle = run_world(1) / "uneven", oracle_of(root / "uneven.json")
    for name in NAMES:
        expected = oracle[name].losses
        assert losses(output_dir, name) == pytest.approx(expected, rel=1e-5), name
    steps = [r for r in records(output_dir, "everything") if "loss" in r]
    # 18 rows twice in batches of 5: seven whole batches and one of a single row.
    assert len(steps) == 8
    assert steps[-1]["tokens"] < min(r["tokens"] for r in steps[:-1])
    summary = summary_of(output_dir)["jobs"]["everything"]
    assert summary["tokens"] == sum(r["tokens"] for r in steps)
    assert (summary["max_steps"], summary["status"]) == (8, "finished")


def test_bf16_follows_the_oracle_with_fp32_masters(root: Path, run_world: World) -> None:
    output_dir, oracle = run_world(1) / "bf16", oracle_of(root / "uneven.json")
    for name in NAMES:
        expected = oracle[name].losses
        assert losses(output_dir, name) == pytest.approx(expected, rel=1e-2), name
        factors = exported(output_dir, name, root / "base")
        values = torch.cat([factor.flatten() for factor in factors.values()])
        assert values.dtype == torch.float32
        assert (values != values.bfloat16().float()).float().mean() > 0.9, name


def in_nano_batches(run: Path) -> dict[str, Any]:
    told = summary_of(run)["run"]
    return told["nano_batches"] | {"rounds": told["rounds"]}


@pytest.mark.parametrize("layout", IN_NANO_BATCHES)
def test_nano_batches_give_the_same_adapters(layout: str, root: Path, run_world: World) -> None:
    whole, cut = (run_world(2) / f"{layout} together{count}" for count in ("", " in 3"))
    one, three = in_nano_batches(whole), in_nano_batches(cut)
    assert {k: v for k, v in one.items() if k not in ("ran", "rounds")} == {
        "asked": 1, "count": 1, "controller": None, "time_over_one": None,
    }  # fmt: skip
    assert (three["asked"], three["count"], three["controller"]) == (3, 3, None)
    assert one["ran"].keys() == {"1"}
    assert three["ran"]["3"] > sum(three["ran"].values()) / 2
    assert sum(three["ran"].values()) == one["ran"]["1"] >= one["rounds"]
    for name in NAMES:
        assert losses(cut, name) == pytest.approx(losses(whole, name), rel=1e-5), name
        expected = exported(whole, name, root / "base")
        for key, value in exported(cut, name, root / "base").items():
            error = float((value - expected[key]).norm() / expected[key].norm())
            assert error < 1e-4, f"{name} {key}"


@pytest.mark.parametrize("layout", IN_NANO_BATCHES)
def test_others_keep_their_bits_in_nano_batches(layout: str, run_world: World) -> None:
    healthy, ill = (run_world(2) / f"{layout} {name} in 3" for name in ("together", NANO_INCIDENT))
    job = INCIDENTS[NANO_INCIDENT].job
    assert summary_of(ill)["jobs"][job]["status"] == "failed"
    for other in set(NAMES) - {job}:
        assert_same_bits(ill, healthy, other)
