"""The example of docs/experts.md by the command line, on a base that was trained for a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.standing_world import forked, world

STEPS = {"mirror": 4, "sums": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> Path:
    """What the maker writes: a base with four experts a layer, and the jobs' data."""
    folder = tmp_path_factory.mktemp("made")
    few = ("--steps", 2, "--batch-size", 4, "--threads", 1)
    forked(repo / "scripts/make_quickstart.py", "--experts", 4, *few, "--output", folder)
    return folder


def test_the_data_are_those_of_the_quickstart(made: Path, repo: Path) -> None:
    files = sorted((made / "data").iterdir())
    stored = sorted((repo / "configs/quickstart/data").iterdir())
    assert [file.name for file in files] == [file.name for file in stored]
    assert all(
        one.read_bytes() == other.read_bytes() for one, other in zip(files, stored, strict=True)
    )


def test_two_processes_train_on_it_and_peft_confirms(
    made: Path, repo: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    overrides = [f"base_model.path={made / 'base'}"]
    for name, count in STEPS.items():
        overrides += [f"jobs.{name}.max_steps={count}", f"jobs.{name}.schedule.warmup_steps=0"]
    settings = [word for override in overrides for word in ("--set", override)]
    config = repo / "configs/quickstart_experts.yaml"
    world("tlora_megatron.cli", 2, "train", config, "--output-dir", out, *settings)
    summary = json.loads((out / "summary.json").read_text())["jobs"]
    assert {name: job["steps"] for name, job in summary.items()} == STEPS
    told = forked(repo / "scripts/verify_adapters.py", out, "--rows", 8, "--device", "cpu")
    assert told.count("yes") == len(STEPS)
