"""A run says where the time went that its user has waited."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.helpers.launch import python
from tests.helpers.scenario import JOBS, make_scenario
from tlora_megatron.timeline import PHASES, time_line


def test_the_phases_of_a_process_add_up_to_what_its_user_waits(tmp_path: Path) -> None:
    config = make_scenario(tmp_path, JOBS[:1], num_steps=2)
    begin_s = time.monotonic()
    output = python("-m", "tlora_megatron.cli", "train", config, f"--output-dir={tmp_path / 'out'}")
    waited_s = time.monotonic() - begin_s
    run = json.loads((tmp_path / "out" / "summary.json").read_text())["run"]
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
