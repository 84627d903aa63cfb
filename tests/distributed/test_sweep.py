"""A sweep's choices and its survivors' bits in every layout, also behind a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.scenario_worlds import entry, run_cases
from tests.helpers.sweeps import SURVIVORS, alone, digest, found, make_sweep

LAYOUTS: dict[str, tuple[str, ...]] = {
    "TP2": ("parallel.tp_size=2",),
    "DP2": (),
    "PP2": ("parallel.pp_size=2",),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sweeps")
    path, cases = make_sweep(root), []
    lone = alone(path, SURVIVORS[0])
    for name, own in LAYOUTS.items():
        cases.append(entry(path, root / name, own, sweep=True))
        cases.append(entry(path, root / f"{name} stopped", own, sweep=True, stop=["math-4", 2]))
        cases.append(entry(path, root / f"{name} stopped", own, sweep=True))
        cases.append(entry(lone, root / f"{name} alone", own))
    run_cases(2, cases, root / "cases.json")
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_chooses_the_same_and_keeps_bits(runs: Path, layout: str) -> None:
    mine = found(runs / layout)
    assert [rung["kept"] for rung in mine["rungs"]] == [
        rung["kept"] for rung in found(runs / "TP2")["rungs"]
    ]
    assert found(runs / f"{layout} stopped") == mine
    assert {trial for trial, _, reason in mine["ranking"] if reason is None} == {*SURVIVORS}
    file = Path("jobs", SURVIVORS[0], "adapter", "adapter_model.safetensors")
    assert digest(runs / layout / file) == digest(runs / f"{layout} alone" / file)
