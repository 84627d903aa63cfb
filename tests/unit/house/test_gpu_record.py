"""The record of the tests on GPUs: what counts as failed, and what CI says of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_tests import (
    RECORD,
    TREES,
    Outcome,
    digests,
    read_report,
    status,
    write_record,
)

REPORT = """<testsuites><testsuite>
 <testcase classname="tests.gpu.a" name="one"/>
 <testcase classname="tests.gpu.a" name="two"><failure message="assert 1 == 2&#10;more"/></testcase>
 <testcase classname="tests.gpu.a" name="three"><error message="no fixture"/></testcase>
 <testcase classname="tests.gpu.a" name="four"><skipped message="needs two CUDA devices, got 1"/>
 </testcase>
 <testcase classname="tests.gpu.a" name="five"><skipped message="Skipped: needs 4 GPUs"/></testcase>
 <testcase classname="tests.gpu.a" name="six"><skipped message="dtype must be bfloat16"/>
 </testcase>
 {more}
</testsuite></testsuites>"""


def report(folder: Path, more: str = "") -> Outcome:
    path = folder / "report.xml"
    path.write_text(REPORT.replace("{more}", more))
    return read_report(path)


def skipped(why: str) -> Outcome:
    return Outcome(passed=1, failures=(), skipped={why: 1})


def test_a_report_is_counted(tmp_path: Path) -> None:
    outcome = report(tmp_path)
    assert outcome.passed == 1
    assert outcome.failures == ("tests.gpu.a::two: assert 1 == 2", "tests.gpu.a::three: no fixture")
    assert sum(outcome.skipped.values()) == 3
    assert "needs 4 GPUs" in outcome.skipped
    assert not outcome.missing
    assert not outcome.is_green


@pytest.mark.parametrize(
    "why",
    [
        "needs transformer_engine",
        "needs deepspeed",
        "could not import 'deepspeed': No module named 'deepspeed'",
        "needs MEGATRON_LM_PATH to name a Megatron-LM checkout",
        "needs a CUDA device",
    ],
)
def test_what_is_sold_and_was_not_run_is_a_failure(why: str) -> None:
    assert skipped(why).missing == {why: 1}
    assert not skipped(why).is_green


@pytest.mark.parametrize(
    "why", ["needs two CUDA devices, got 1", "needs 3 GPUs", "rank must be at least 8, got 4"]
)
def test_what_one_gpu_cannot_run_is_no_failure(why: str) -> None:
    assert skipped(why).is_green


def test_nothing_that_passes_is_no_success() -> None:
    assert not Outcome(passed=0, failures=(), skipped={}).is_green


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with a file in each covered folder, and a record of its first commit."""
    for name in TREES:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "file.py").write_text("1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t", *words]
        subprocess.run(command, check=True)
    return tmp_path


def record(tree: Path, *, passed: bool = True, **more: Any) -> Path:
    head = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    path = tree / "last_run.json"
    kept = {"passed": passed, "commit": commit, "trees": digests(tree)} | more
    path.write_text(json.dumps(kept))
    return path


def test_the_line_says_what_has_changed(tree: Path) -> None:
    path = record(tree)
    line, is_good = status(path, tree)
    assert line.endswith("nothing that they cover has changed")
    assert is_good
    (tree / TREES[0] / "file.py").write_text("2\n")
    (tree / "csrc" / "file.py").write_text("2\n")
    line, is_good = status(path, tree)
    assert f"since then 2 files that they cover have changed, in {TREES[0]}, csrc" in line
    assert is_good, "CI fails only on a record that says so"


def test_a_failed_record_fails(tree: Path) -> None:
    line, is_good = status(record(tree, passed=False), tree)
    assert "FAILED" in line
    assert not is_good


GREEN = Outcome(passed=1, failures=(), skipped={})


@pytest.mark.parametrize("failures", [[], ["step: exit status 1: CUDA error"]])
def test_what_cannot_be_measured_is_a_failure(tmp_path: Path, failures: list[str]) -> None:
    path = tmp_path / "last_run.json"
    smoke = {"figures": [{"short": True}], "failures": failures}
    assert write_record(GREEN, 10.0, "abc", smoke, path) == (not failures)
    # A run that leaves the figures out keeps them, and what they failed by.
    assert write_record(GREEN, 10.0, "def", None, path) == (not failures)
    kept = json.loads(path.read_text())
    assert kept["commit"] == "def"
    assert kept["smoke"] == smoke
    assert kept["passed"] == (not failures)


def test_the_record_in_the_tree_is_whole() -> None:
    kept = json.loads(RECORD.read_text())
    assert kept["passed"]
    assert set(kept["trees"]) == set(TREES)
    assert kept["tests"]["passed"] > 1000
    assert kept["tests"]["failures"] == []
    assert kept["tests"]["missing"] == 0
    assert "H100" in kept["device"] or "H200" in kept["device"]
