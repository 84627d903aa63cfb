"""The quickstart's examples, drawn weights, and where the time of a run went."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.launch import HANG_S, REPO, environment, python
from tests.helpers.scenario import JOBS, load_scenario, losses, make_scenario, summary_of
from tests.helpers.standing_world import forked, world
from tlora_megatron.runtime.controller import train_run
from tlora_megatron.timeline import PHASES, time_line

STEPS = {"mirror": 4, "sums": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> Path:
    """What the maker writes: a base with four experts a layer, and the jobs' data."""
    folder = tmp_path_factory.mktemp("made")
    few = ("--steps", 2, "--batch-size", 4, "--threads", 1)
    forked(repo / "scripts/make_quickstart.py", "--experts", 4, *few, "--output", folder)
    return folder


def test_the_data_are_those_of_the_quickstart(made: Path, repo: Path) -> None:
    base = repo / "configs/quickstart"
    files, stored = (
        sorted(file for part in ("data", "pairs") for file in (folder / part).iterdir())
        for folder in (made, base)
    )
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
    summary = summary_of(out)["jobs"]
    assert {name: job["steps"] for name, job in summary.items()} == STEPS
    told = forked(repo / "scripts/verify_adapters.py", out, "--rows", 8, "--device", "cpu")
    assert told.count("yes") == len(STEPS)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("TLORA_ALL_TESTS") != "1",
    reason="both clients have suites of their own: set TLORA_ALL_TESTS=1",
)
def test_two_clients_train_and_ask(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "scripts" / "quickstart_live.py"), "--steps", "2"]
    env = environment() | {"TINKER_TELEMETRY": "0"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"page: http://127\.0\.0\.1:\d+/#token=tml-tlora-", done.stdout)
    for client in ("openai", "tinker"):
        assert re.search(rf"{client}: \d+% of 16 right after 2 steps", done.stdout)


@pytest.fixture(scope="module")
def shape_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario whose base has no weights and whose config.json has another name."""
    config = make_scenario(tmp_path_factory.mktemp("drawn"))
    base = config.parent / "base"
    (base / "model.safetensors").unlink()
    (base / "config.json").rename(base / "shape.json")
    document = json.loads(config.read_text())
    document["base_model"] = {"config": "base/shape.json", "random_init": True, "dtype": "float32"}
    document["jobs"] = [document["jobs"][0] | {"max_steps": 3}]
    config.write_text(json.dumps(document))
    return config


def test_weights_follow_the_seed(shape_only: Path) -> None:
    runs = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        out = shape_only.parent / name
        overrides = (f"base_model.seed={seed}",)
        train_run(load_scenario(shape_only, *overrides, output_dir=out))
        runs[name] = losses(out, "attention")
    assert len(runs["first"]) == 3
    assert runs["again"] == runs["first"]
    assert runs["other"] != runs["first"]


_NEW_VARIABLES = """
import os, pathlib, sys
from tlora_megatron.runtime import controller
from tests.helpers.train_worker import train_until

know_base, names = controller.know_base, []

def know(config):
    known = know_base(config)
    names.extend(os.environ)
    return known

controller.know_base = know
train_until(*map(pathlib.Path, sys.argv[1:]))
print("new:", sorted(set(os.environ) - set(names)))
"""


def test_no_variable_is_new_once_a_thread_reads_data(shape_only: Path, tmp_path: Path) -> None:
    """setenv moves the variables that the tokenizer's getenv reads: one rank in thousands died."""
    said = forked("-c", _NEW_VARIABLES, shape_only, tmp_path / "out")
    assert said.splitlines()[-1] == "new: []"


def test_the_phases_of_a_process_add_up_to_what_its_user_waits(tmp_path: Path) -> None:
    config = make_scenario(tmp_path, JOBS[:1], num_steps=2)
    begin_s = time.monotonic()
    output = python("-m", "tlora_megatron.cli", "train", config, f"--output-dir={tmp_path / 'out'}")
    waited_s = time.monotonic() - begin_s
    run = summary_of(tmp_path / "out")["run"]
    times = run["time_s"]
    assert tuple(times) == PHASES
    assert sum(times.values()) == pytest.approx(run["wall_time_s"], rel=0.02)
    # A process's start is known to a hundredth of a second.
    assert 0 < run["wall_time_s"] < waited_s + 0.02
    for name in ("imports", "base", "data", "rounds", "evaluation"):
        assert times[name] > 0, name
    # The other clock is read around this one: what a busy machine does between them is in it alone.
    assert times["rounds"] <= run["train_time_s"]
    assert f"time: {time_line(run)}" in output
