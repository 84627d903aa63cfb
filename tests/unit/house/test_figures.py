"""Figures of the pages are those of their rows, and what is none of these is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.figures.__main__ import REPO, main
from scripts.figures.check import checked

PAGE = """# Speed
Together they reach **1,234 tokens/s**, 20 %
more than alone, on torch 2.11 and `9.9 s` of 7 GPUs. Rows: [steps.csv](steps.csv), commits aaa1111
and bbb2222.

| one GPU | tokens/s | step, ms (over its floor) |
|---|---|---|
| 8 jobs | **1,234** | 41.5 (1.10) |
| alone | 1,028 | |
"""
ROWS = """commit,mode,tokens_per_s,step_s,floor_s
aaa1111,together,1234.4,0.04148,0.0377
bbb2222,alone,1028.3,0.05,0.05
"""
ADDRESSES = """
measures: {steps: [code]}
without_row: {versions: [torch 2.11]}
pages:
  docs/page.md:
    Speed:
      where: {csv: steps, mode: together}
      text:
      - reach **{tokens_per_s} tokens/s**,
        {100 * (tokens_per_s / at(mode="alone").tokens_per_s - 1)} % more
      tables:
      - columns: [tokens_per_s, '{1000 * step_s} ({step_s / floor_s})']
        rows:
        - 8 jobs: {}
        - alone: {mode: alone}
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A page with its addresses and rows, all of which agree."""
    for folder in ("docs", "scripts/bench/results", "code"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs/page.md").write_text(PAGE)
    (tmp_path / "docs/figures.yaml").write_text(ADDRESSES)
    (tmp_path / "scripts/bench/results/steps.csv").write_text(ROWS)
    return tmp_path


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_every_figure_of_the_pages_is_that_of_its_row() -> None:
    report = checked(REPO)
    assert report.problems == []
    assert {figure.place.page for figure in report.figures} == {"README.md", "docs/benchmarks.md"}


def test_figures_that_agree_make_no_problem(repo: Path) -> None:
    report = checked(repo)
    assert report.problems == []
    assert [figure.text for figure in report.figures] == [
        *("1,234", "20"),
        *("1,234", "41.5", "1.10", "1,028"),
    ]
    assert report.figures[1].rows == (("steps", "aaa1111"), ("steps", "bbb2222"))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "| **1,234** |",
            "| **1,235** |",
            "8 jobs | tokens/s: the page says 1,235, the row 1234.4",
        ),
        ("41.5 (1.10)", "41.5 (1.11)", "the page says 1.11"),
        ("20 %\nmore", "21 %\nmore", "the page says 21, the row 20.04"),
        ("| 1,028 | |", "| 1,028 | 50.0 |", "must say once, says 0 times"),
        ("| 1,028 | |", "| 1,028 | 50.0 |", "50.0 has no address"),
        ("than alone", "than alone, in 3 s", "3 has no address"),
        ("than alone", "than alone, 1,000 or 12 of them", "1,000 has no address"),
        ("than alone", "than **5** alone", "5 has no address"),
        ("torch 2.11", "torch", "no page has this phrase: torch 2.11"),
        ("Together they reach", "They have", "must say once, says 0 times"),
        ("| alone |", "| by itself |", "rows must be ['8 jobs', 'by itself'], got"),
        ("# Speed", "# Pace", "docs/page.md has no such section: Speed"),
        ("commits aaa1111\nand bbb2222", "commit aaa1111", "commits aaa1111 and bbb2222"),
        ("bbb2222.", "bbb2222, ccc3333.", "must say [steps.csv](...), commits aaa1111 and"),
    ],
)
def test_a_page_that_differs_is_found(repo: Path, old: str, new: str, problem: str) -> None:
    change(repo / "docs/page.md", old, new)
    assert any(problem in found for found in checked(repo).problems)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("1234.4", "1234.6", "the page says 1,234, the row 1234.6"),
        ("aaa1111,", "ccc3333,", "commits ccc3333 and bbb2222"),
        (",alone,", ",by itself,", "a selector must fit a row of steps.csv"),
        ("bbb2222,alone", "bbb2222,together", "an address must give one value"),
        ("floor_s", "base_s", "names must be columns of steps.csv, got ['floor_s']"),
    ],
)
def test_rows_that_differ_are_found(repo: Path, old: str, new: str, problem: str) -> None:
    change(repo / "scripts/bench/results/steps.csv", old, new)
    assert any(problem in found for found in checked(repo).problems)


def test_a_file_must_say_what_it_measures(repo: Path) -> None:
    change(repo / "docs/figures.yaml", "steps: [code]", "other: [gone]")
    problems = checked(repo).problems
    assert "docs/figures.yaml: measures must name the folders that steps measures" in problems
    assert "docs/figures.yaml: what other measures must exist, got gone" in problems


def test_the_program_returns_1_for_a_figure_that_differs_and_0_for_a_stale_one(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--stale"], repo) == 0
    assert "steps.csv  aaa1111  5 figures" in capsys.readouterr().out
    change(repo / "docs/page.md", "| 1,028 |", "| 1,029 |")
    assert main([], repo) == 1
    assert "the page says 1,029" in capsys.readouterr().out
    assert main(["--json"], repo) == 1
    figure = json.loads(capsys.readouterr().out)["figures"][-1]
    assert figure["cell"] == "alone | tokens/s"
    assert figure["value"] == 1028.3
    assert figure["rows"] == [["steps", "bbb2222"]]
