"""A job over an FP8 base goes on over the same codes, in any layout, and over others if it may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scenario import JOBS, losses, make_scenario
from tests.helpers.scenario_worlds import run_cases

FP8 = "base_model.quantization=fp8"


def case(config: Path, steps: int, *sets: str) -> dict[str, Any]:
    """The scenario's job, trained to so many steps in one folder."""
    output_dir = str(config.parent / "out")
    values = [f"jobs.mlp.max_steps={steps}", "jobs.mlp.schedule.name=constant", *sets]
    return {"config": str(config), "output_dir": output_dir, "set": values}


def test_a_job_keeps_to_its_codes(tmp_path: Path) -> None:
    config = make_scenario(tmp_path, [JOBS[1]], num_steps=4)
    adapter, checkpoints = (tmp_path / "out/jobs/mlp" / n for n in ("adapter", "checkpoints"))
    run_cases(1, [case(config, 4, FP8)], tmp_path / "first.json")
    assert "one scale an output channel" in (adapter / "README.md").read_text()
    state = json.loads((checkpoints / "step_00000004/state.json").read_text())
    run_cases(2, [case(config, 6, FP8, "parallel.tp_size=2")], tmp_path / "tp.json")
    later = json.loads((checkpoints / "step_00000006/state.json").read_text())
    assert state["quantisation"] == later["quantisation"]
    elsewhere = case(config, 8, f"jobs.mlp.resume_from={checkpoints}")
    elsewhere["output_dir"] = str(tmp_path / "other")
    with pytest.raises(AssertionError, match=r"quantization must be fp8 .* got null .bf16 or fp32"):
        run_cases(1, [elsewhere], tmp_path / "refused.json")
    log = run_cases(1, [case(config, 8, "base_model.allow_change=true")], tmp_path / "wide.json")
    assert len(losses(tmp_path / "out", "mlp")) == 8, log
    assert not (adapter / "README.md").exists()
