"""The smoke figures: where they are read, when one is short, and a run of all parts on a CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from scripts.bench.harness.rows import append_rows
from scripts.bench.smoke import __main__ as smoke
from scripts.bench.smoke import parts
from scripts.bench.smoke.figures import figures, show
from scripts.bench.smoke.parts import Part, parts_on_gpu, run_parts

ALL = figures("six layers", "six layers")
STATED = {
    "8B step of eight jobs, bf16, over the bare model": 432.5 / 392.42,
    "8B step of eight jobs, FP8 base, over the bare FP8 model": 306.76 / 270.57,
    "flag, local spec, over our own trainer": 462.22 / 461.92,
    "flag, Transformer Engine bf16, over our own trainer": 465.03 / 459.95,
    "flag, Transformer Engine FP8, over our own FP8 trainer": 1.02,
    "flag, Transformer Engine FP8, over the bare FP8 model": 350.85 / 337.66,
    "warm submit to first step": 0.3215,
    "tlora train to its first step, six layers": 15.72,
}
"""What README.md and docs say, with the digits of their rows."""


def test_every_figure_is_the_one_in_the_docs() -> None:
    expected = {}
    for figure in ALL:
        seconds, ratio = figure.expected()
        expected[figure.name] = ratio if seconds is None else seconds
    assert expected == pytest.approx(STATED)


def test_every_part_has_a_figure() -> None:
    found = parts_on_gpu(Path("checkout"), None)
    assert [part.name for part in found] == list(dict.fromkeys(figure.part for figure in ALL))
    # Imports are not what is measured: all but the first are started ahead of their turn.
    assert [part.starts_ahead for part in found] == [False] + [True] * (len(found) - 1)


@pytest.mark.parametrize(
    ("name", "value", "short"),
    [
        ("flag, Transformer Engine FP8, over our own FP8 trainer", 107.0, False),
        ("flag, Transformer Engine FP8, over our own FP8 trainer", 107.2, True),
        ("warm submit to first step", 0.8, False),
        ("warm submit to first step", 0.83, True),
        ("tlora train to its first step, six layers", 18.7, False),
        ("tlora train to its first step, six layers", 18.8, True),
    ],
)
def test_a_figure_is_short(tmp_path: Path, name: str, value: float, short: bool) -> None:
    figure = next(figure for figure in ALL if figure.name == name)
    file, measured = tmp_path / "rows.csv", figure.measured
    rows = [{**measured.row, measured.column: str(value)}]
    if measured.over is not None:
        rows.append({**measured.row, **measured.over, measured.column: "100.0"})
    append_rows(file, rows)
    found = figure.measure(file, compares=True)
    assert (found.value, found.short) == (value, short)
    assert ("SHORT: " + name in show([found])) == short
    assert not figure.measure(file, compares=False).short


WRITES = """
import sys, time
from pathlib import Path
from scripts.bench.harness.processes import wait_for_turn
folder = Path({folder!r})
(folder / "{name} began").touch()
wait_for_turn()
(folder / "{name} has its turn").touch()
{more}
"""


def script(folder: Path, name: str, more: str, *, ahead: bool = False) -> Part:
    module = folder / f"part_{name}.py"
    module.write_text(WRITES.format(folder=str(folder), name=name, more=more))
    return Part(name=name, words=(module.stem,), starts_ahead=ahead)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return tmp_path


def test_parts_take_turns_and_a_failure_is_told(folder: Path) -> None:
    rows = "Path(sys.argv[sys.argv.index('--csv') + 1]).write_text('rows')"
    waits = """
while not (folder / 'second began').exists():
    time.sleep(0.01)
assert not (folder / 'second has its turn').exists()
"""
    chosen = [
        script(folder, "first", waits + rows),
        script(folder, "second", "raise RuntimeError('out of order')", ahead=True),
        script(folder, "third", rows),
    ]
    ended = {}
    for part, end, file in run_parts(chosen, folder, "abc", 60.0):
        ended[part.name] = (end.failure, file.is_file())
        assert not (folder / "third began").exists() or part.name == "third"
    assert ended == {
        "first": ("", True),
        "second": ("exit status 1: RuntimeError: out of order", False),
        "third": ("", True),
    }


def test_a_part_that_hangs_is_ended(folder: Path) -> None:
    hangs = "try: time.sleep(1000)\nfinally: (folder / 'ended what it had started').touch()"
    ((_, ended, _),) = run_parts([script(folder, "only", hangs)], folder, "abc", 3.0)
    assert ended.failure.startswith("took over 3 s: ")
    assert (folder / "ended what it had started").exists()


def test_a_failed_part_fails_the_run_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "train.csv"
    append_rows(rows, [{"case": "toy", "first_step_s": "3.0"}])
    chosen = {"step": "exit status 1: out of memory", "submit": "", "train": ""}

    def pretend(*_: object) -> object:
        for name, failure in chosen.items():
            ended = parts.Ended(seconds=1.0, failure=failure, output="many\nlines")
            yield Part(name=name, words=()), ended, rows

    monkeypatch.setattr(smoke, "run_parts", pretend)
    file = tmp_path / "smoke.json"
    assert smoke.main(["--size", "toy", "--json", str(file)]) == 1
    found = json.loads(file.read_text())
    assert found["failures"][0] == "step: exit status 1: out of memory"
    assert "train.csv must have one row with" in found["failures"][1], "submit wrote none"
    assert [figure["value"] for figure in found["figures"]] == [3.0]
    assert "FAILED smoke: step: exit status 1" in capsys.readouterr().out
