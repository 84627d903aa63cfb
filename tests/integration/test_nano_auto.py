"""A run that chooses its nano-batches: the jobs' losses, what it writes, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scenario import JOBS, losses, make_scenario, summary_of
from tests.helpers.scenario_worlds import entry, run_cases

NUM_STEPS = 22
"""Enough to try every number of nano-batches and to keep one."""
LAYOUT = ["parallel.tp_size=2", "parallel.sequence_parallel=true", "run.micro_batch_tokens=2048"]


def train(root: Path, *cases: tuple[Path, str, str]) -> None:
    entries = [
        entry(config, root / out, [*LAYOUT, f"run.{nano}"], report=True)
        for config, out, nano in cases
    ]
    run_cases(2, entries, root / "cases.json")


def trace(output_dir: Path) -> list[dict[str, Any]]:
    lines = (output_dir / "nano_batches.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_losses_trace_and_going_on(tmp_path: Path) -> None:
    config = make_scenario(tmp_path, num_steps=NUM_STEPS)
    train(tmp_path, (config, "whole", "nano_batches=1"), (config, "auto", "nano_batches=auto"))
    output_dir = tmp_path / "auto"
    for job in JOBS:
        expected = losses(tmp_path / "whole", job["name"])
        assert losses(output_dir, job["name"]) == pytest.approx(expected, rel=2e-4)
    lines = trace(output_dir)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS))
    assert {1, 2, 3} <= {line["nano_batches"] for line in lines}
    assert len({line["mix"] for line in lines}) == 1
    summary = summary_of(output_dir)
    told = summary["run"]["nano_batches"]
    assert (told["asked"], told["controller"]) == ("auto", "best")
    assert {"1", "2", "3"} <= told["ran"].keys()
    assert "<h2>Nano-batches</h2>" in (output_dir / "report.html").read_text()
    assert not (tmp_path / "whole" / "nano_batches.jsonl").exists()

    # The run is lengthened; as if it had explored to the end and 2 had been its choice.
    lines[-1] |= {"kept": 2, "chosen": 2, "phase": "keep"}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (output_dir / "nano_batches.jsonl").write_text(text)
    document = json.loads(config.read_text())
    for job in document["jobs"]:
        job["max_steps"] = NUM_STEPS + 6
    config.write_text(json.dumps(document))
    train(tmp_path, (config, "auto", "nano_batches=auto"))
    later = trace(output_dir)[len(lines) :]
    assert [line["step"] for line in later] == list(range(NUM_STEPS, NUM_STEPS + 5))
    assert {(line["nano_batches"], line["phase"]) for line in later} == {(2, "keep")}
