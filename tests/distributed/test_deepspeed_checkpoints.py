"""A job's checkpoint is taken up by any ZeRO stage and TP size, and by Megatron's engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers import scenario_worlds
from tests.helpers.block_jobs import BLOCK_JOBS
from tests.helpers.deepspeed_cases import run_cases, write_config, zero
from tests.helpers.scenario import JOBS, adapter_tensors, losses, make_scenario
from tests.helpers.scenario_worlds import entry

ALL_JOBS = (*JOBS, BLOCK_JOBS[0])
NAMES = tuple(job["name"] for job in ALL_JOBS)
NUM_STEPS, HALF = 4, 2
TP2 = {"tensor_parallel": {"autotp_size": 2}}
Layout = tuple[str, dict[str, Any] | None]
"""The processes, and the DeepSpeed JSON; None = Megatron's engine."""
LAYOUTS: dict[str, Layout] = {
    "Megatron": ("one", None),
    "ZeRO-1": ("DP2", zero(1)),
    "ZeRO-2": ("DP2", zero(2)),
    "ZeRO-3": ("DP2", zero(3)),
    "TP2 ZeRO-0": ("TP2", zero(0) | TP2),
    "TP2 ZeRO-3": ("TP2", zero(3) | TP2),
}
SOURCES = ("Megatron", "ZeRO-2", "TP2 ZeRO-3")
MOVES = (
    ("Megatron", "ZeRO-3"),
    ("Megatron", "TP2 ZeRO-0"),
    ("ZeRO-2", "Megatron"),
    ("ZeRO-2", "TP2 ZeRO-0"),
    ("ZeRO-2", "ZeRO-3"),
    ("TP2 ZeRO-3", "ZeRO-1"),
    ("TP2 ZeRO-3", "Megatron"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the scenario, the runs from the start, and those that go on from their middle."""
    root = tmp_path_factory.mktemp("deepspeed_checkpoints")
    run = {"checkpoint_every_steps": HALF, "portion_tokens": 64}
    dropout = dict.fromkeys(NAMES, 0.1)  # its masks, too, are the same in every layout
    config = make_scenario(root, ALL_JOBS, num_steps=NUM_STEPS, dropout=dropout, run=run)
    section = json.loads(config.read_text())
    _train(root, [(f"from {name}", name, section) for name in SOURCES])
    _train(root, [(f"{a} to {b}", b, _resumed(root, section, a)) for a, b in MOVES])
    return root


def _resumed(root: Path, section: dict[str, Any], source: str) -> dict[str, Any]:
    """Every job goes on from its checkpoint in the middle of a source's run."""
    step = f"checkpoints/step_{HALF:08d}"
    jobs = [
        job | {"resume_from": str(root / f"from {source}" / "jobs" / job["name"] / step)}
        for job in section["jobs"]
    ]
    return section | {"jobs": jobs}


def _train(root: Path, runs: list[tuple[str, str, dict[str, Any]]]) -> None:
    by_world: dict[str, list[dict[str, Any]]] = {}
    for name, layout, section in runs:
        world, deepspeed = LAYOUTS[layout]
        config = root / f"{name}.json"
        if deepspeed is None:
            config.write_text(json.dumps(section))
        else:
            write_config(config, deepspeed, section)
        by_world.setdefault(world, []).append(entry(config, root / name))
    for world, cases in by_world.items():
        if world == "one":
            scenario_worlds.run_cases(1, cases, root / "cases.json")
        else:
            run_cases(2, cases, root / "cases.json")


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_a_job_goes_on_elsewhere_as_if_it_had_stayed(source: str, target: str, root: Path) -> None:
    stayed, moved = root / f"from {source}", root / f"{source} to {target}"
    for name in NAMES:
        expected = losses(stayed, name)
        assert len(expected) == NUM_STEPS
        assert losses(moved, name) == pytest.approx(expected[HALF:], rel=1e-5), name
        ours, theirs = adapter_tensors(moved, name), adapter_tensors(stayed, name)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert float((ours[key] - value).norm() / value.norm()) < 1e-4, f"{name} {key}"
