"""Failures of the benchmark of Megatron-LM's layouts."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from scripts.bench.harness.processes import Life
from scripts.bench.megatron_lm import __main__ as layouts
from scripts.bench.megatron_lm import cases

COMMON = {"gpu": "H200", "versions": "torch 2", "commit": "abc", "megatron_lm": "0.19.1"}
ALONE = {"chat": [4.0, 2.0], "code": [5.0]}


def write_losses(out: Path, **jobs: list[float]) -> None:
    for name, values in jobs.items():
        folder = out / "jobs" / name
        folder.mkdir(parents=True)
        lines = [json.dumps({"step": i, "loss": x}) for i, x in enumerate(values, 1)]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_a_row_a_job_with_its_largest_relative_error(tmp_path: Path) -> None:
    write_losses(tmp_path, chat=[4.0, 2.002], code=[5.0])
    layout = cases.LAYOUTS[0]
    found = cases.compare(layout, tmp_path, ALONE, COMMON)
    assert [(row["job"], row["steps"]) for row in found] == [("chat", 2), ("code", 1)]
    assert [row["max_rel_loss_error"] for row in found] == pytest.approx([1e-3, 0.0])
    (sentence,) = cases.verdicts(layout, found, ALONE)
    assert sentence == f"{layout.name}: chat is 1.0e-03 off, at most 3e-06"
    cases.write(found, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        written = list(csv.DictReader(file))
    columns = "gpu,world,versions,commit,megatron_lm,layout,precision,job,steps,max_rel_loss_error"
    assert ",".join(written[0]) == columns
    assert written[0]["max_rel_loss_error"] == "1.00e-03"


@pytest.mark.parametrize("jobs", [{"chat": [4.0]}, {"chat": [4.0, float("nan")]}, {"chat": []}, {}])
def test_a_loss_that_is_missing_or_no_number_is_wrong(
    tmp_path: Path, jobs: dict[str, list[float]]
) -> None:
    write_losses(tmp_path, code=[5.0], **jobs)
    layout = cases.LAYOUTS[0]
    found = cases.compare(layout, tmp_path, ALONE, COMMON)
    assert cases.verdicts(layout, found, ALONE)


def test_a_run_must_say_that_it_ran_as_asked(tmp_path: Path) -> None:
    layout = cases.Layout(name="x", nano=2, says="staggered")
    for output, expected in (("run staggered", None), ("run whole", "x: must say 'staggered'")):
        assert layouts.failure(layout, Life(0, 3.0, output)) == expected
    (tmp_path / "jobs.json").write_text(json.dumps({"run": {"tensorboard": False}, "jobs": []}))
    cases.write_nano_jobs(tmp_path, [layout])
    written = json.loads((tmp_path / cases.jobs_file(layout)).read_text())
    assert written == {"run": {"tensorboard": False, "nano_batches": 2}, "jobs": []}


@pytest.mark.parametrize(
    ("refusal", "code", "output", "expected"),
    [
        ("", 0, "", None),
        ("", 1, "", "exit status 1"),
        ("", None, "", "took over"),
        ("q_norm", 1, "missing: q_norm", None),
        ("q_norm", 0, "", "must fail over q_norm"),
        ("q_norm", 1, "out of memory", "something else"),
    ],
)
def test_how_a_run_may_end(
    refusal: str, code: int | None, output: str, expected: str | None
) -> None:
    layout = cases.Layout(name="x", refusal=refusal)
    sentence = layouts.failure(layout, Life(code, 3.0, output))
    assert sentence is None if expected is None else expected in sentence
