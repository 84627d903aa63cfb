"""The heart: in every layout a job gets what transformers and PEFT give it alone.

All runs of one world size share one set of processes; each is a whole `train_run`, checked by the
files it leaves.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.scenario import (
    JOBS,
    NUM_STEPS,
    assert_run_equals_oracle,
    make_scenario,
    oracle_of,
    records,
    summary_of,
    take_fingerprint,
)
from tests.helpers.scenario_worlds import World, cases_of, entry, run_cases, worlds
from tests.helpers.session import further

NAMES = tuple(job["name"] for job in JOBS)
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "one process": (),
        "full recompute": ("run.recompute=full",),
        "selective recompute": ("run.recompute=selective",),
        "small micro-batches": ("run.micro_batch_tokens=104",),
        "recompute by rows": ("run.recompute=auto", "run.gpu_memory_gb=0.00312"),
    },
    2: {
        "TP2": ("parallel.tp_size=2",),
        "TP2+SP": ("parallel.tp_size=2", "parallel.sequence_parallel=true"),
        "PP2": ("parallel.pp_size=2", "parallel.lora_sharding=s_lora"),
        "PP2 uneven": ("parallel.pp_size=2", "parallel.first_stage_layers=3", "run.recompute=full"),
        "TP2+SP recompute by rows": ("parallel.tp_size=2", "parallel.sequence_parallel=true",
         "run.nano_batches=2", "run.recompute=auto", "run.gpu_memory_gb=0.30238"),
        "PP2 recompute by rows": ("parallel.pp_size=2", "run.recompute=auto",
         "run.gpu_memory_gb=0.3022"),
        "DP2": (),
        "TP2+SP in nano-batches of its choice": ("parallel.tp_size=2",
         "parallel.sequence_parallel=true", "run.nano_batches=auto"),
        "CP2": ("parallel.cp_size=2",),
        "CP2 and recompute by micro-batch": ("parallel.cp_size=2",
         "parallel.cp_by_micro_batch=true", "run.micro_batch_tokens=128", "run.round_depth=2",
         "run.recompute=auto", "run.gpu_memory_gb=0.3029"),
        **further({
            "CP2 recompute by rows": ("parallel.cp_size=2", "run.recompute=auto",
             "run.gpu_memory_gb=0.3029"),
        }),
    },
    4: {
        "TP2xPP2": ("parallel.tp_size=2", "parallel.pp_size=2"),
        "TP2+SPxDP2": ("parallel.tp_size=2", "parallel.sequence_parallel=true"),
        "TP2+SPxCP2": ("parallel.tp_size=2", "parallel.cp_size=2",
         "parallel.sequence_parallel=true"),
    },
}  # fmt: skip
CASES = [(world, name) for world, layouts in LAYOUTS.items() for name in layouts]
TEAMS_AMONG_FOUR: dict[str, tuple[str, ...]] = {
    "CP4 by micro-batch": ("parallel.cp_size=4", "parallel.cp_by_micro_batch=true",
     "run.micro_batch_tokens=104", "run.round_depth=4"),
    "TP2+SPxCP2 by micro-batch": ("parallel.tp_size=2", "parallel.cp_size=2",
     "parallel.sequence_parallel=true", "parallel.cp_by_micro_batch=true",
     "run.micro_batch_tokens=128"),
}  # fmt: skip


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_scenario(tmp_path_factory.mktemp("lossless"), num_layers=4)
    take_fingerprint(path.parent / "base")  # every layout is held to it
    return path


@pytest.fixture(scope="module")
def run_world(scenario: Path) -> World:
    return worlds(scenario.parent, lambda size: cases_of(scenario, LAYOUTS[size]))


@pytest.mark.parametrize(("world_size", "layout"), CASES, ids=[name for _, name in CASES])
def test_equals_oracle(output_dir: Path, scenario: Path) -> None:
    assert_run_equals_oracle(output_dir, NAMES, scenario)


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_adapters_are_folded_unless_asked_otherwise(layout: str, run_world: World) -> None:
    summary = summary_of(run_world(2) / layout)
    assert summary["run"]["layout"]["lora_sharding"] == "fold"


def test_nano_batches_are_tried_and_told(run_world: World) -> None:
    summary = summary_of(run_world(2) / "TP2+SP in nano-batches of its choice")
    told = summary["run"]["nano_batches"]
    assert (told["asked"], told["controller"]) == ("auto", "best")
    assert {"1", "2"} <= told["ran"].keys()


@pytest.mark.parametrize(("world_size", "layout"), [c for c in CASES if "by rows" in c[1]])
def test_recompute_by_rows_is_told(output_dir: Path) -> None:
    summary = summary_of(output_dir)
    assert re.fullmatch(
        r"none to \d\d rows, selective to \d\d, full beyond", summary["run"]["recompute"]
    )


@pytest.mark.parametrize(("world_size", "layout"), [c for c in CASES if "by micro-batch" in c[1]])
def test_ranks_run_micro_batches_together_and_alone(output_dir: Path) -> None:
    assert sizes_of_teams(output_dir) == {"1", "2"}


def sizes_of_teams(output_dir: Path) -> set[str]:
    summary = summary_of(output_dir)
    ran = summary["run"]["balance"]["micro_batches_by_cp_size"]
    return {size for size, count in ran.items() if count > 0}


@pytest.mark.four_processes
def test_teams_among_four_ranks(scenario: Path) -> None:
    out = worlds(scenario.parent / "teams", lambda _: cases_of(scenario, TEAMS_AMONG_FOUR))(4)
    for layout in TEAMS_AMONG_FOUR:
        assert_run_equals_oracle(out / layout, NAMES, scenario)
        teams = {"1", "2", "4"} if layout.startswith("CP4") else {"1", "2"}
        assert sizes_of_teams(out / layout) == teams


def test_jobs_begin_with_adapters_of_another_layout(
    run_world: World, scenario: Path, tmp_path: Path
) -> None:
    trained, out = run_world(1) / "one process", tmp_path / "out"
    document = json.loads(scenario.read_text())
    for job in document["jobs"]:
        adapter = str(trained / "jobs" / job["name"] / "adapter")
        job |= {"init_from": adapter, "max_steps": 1, "schedule": {}}
    config = scenario.with_name("continued.json")
    config.write_text(json.dumps(document))
    run_cases(2, [entry(config, out, LAYOUTS[2]["TP2+SP"])], tmp_path / "cases.json")
    for name in NAMES:
        first, then = (summary_of(run)["jobs"][name] for run in (trained, out))
        assert then["eval_loss_before"] == pytest.approx(first["eval_loss_after"], rel=1e-5), name
        assert then["eval_loss_before"] < first["eval_loss_before"], name


def test_the_scenario_clips_and_moves(scenario: Path) -> None:
    oracle = oracle_of(scenario)
    clipped = {
        job["name"]: job["optimizer"]["max_grad_norm"] for job in JOBS if job["name"] != "outputs"
    }
    for name, limit in clipped.items():
        assert sum(norm > limit for norm in oracle[name].grad_norms) > NUM_STEPS // 4, name
    for name, result in oracle.items():
        moved = [factor for key, factor in result.factors.items() if key.endswith("lora_b")]
        assert all(float(factor.abs().max()) > 2e-3 for factor in moved), name  # begun at zero
    for name in ("everything", "outputs"):  # one or two rows a step say little
        assert oracle[name].losses[-1] < 0.95 * oracle[name].losses[0], name


def test_metrics_hold_every_step_with_the_oracle_s_norms_and_rates(
    run_world: World, scenario: Path
) -> None:
    oracle = oracle_of(scenario)
    for name in NAMES:
        steps = [r for r in records(run_world(1) / "one process", name) if "loss" in r]
        assert [r["step"] for r in steps] == list(range(1, NUM_STEPS + 1))
        assert [r["grad_norm"] for r in steps] == pytest.approx(oracle[name].grad_norms, rel=1e-5)
        assert [r["lr"] for r in steps] == pytest.approx(oracle[name].lrs, rel=1e-9, abs=1e-12)
