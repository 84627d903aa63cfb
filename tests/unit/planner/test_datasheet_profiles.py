"""Hardware profiles of data sheets are what is made of measured ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scripts import datasheet_profiles
from tlora_megatron.cli.profile import profile_json
from tlora_megatron.planner.hardware import load_profile

DATA_SHEETS = ("a100-80g", "l40s", "b200", "gb200")


def test_data_sheet_profiles_are_what_is_made_of_measured_ones(repo: Path, tmp_path: Path) -> None:
    folder = repo / "configs/hardware"
    base = load_profile(folder / "h200.json")
    for made in datasheet_profiles.all_profiles(base, folder):
        path = tmp_path / f"{made.name}.json"
        path.write_text(profile_json(made))  # rounds
        shipped = load_profile(folder / f"{made.name}.json")
        assert load_profile(path) == shipped
        assert shipped.source == "datasheet"
    made_of = {path.stem for path in tmp_path.iterdir()}
    assert made_of == {*DATA_SHEETS, "h100-infiniband", "h200-infiniband"}


def test_a_profile_of_one_gpu_gets_another_machines_links(repo: Path) -> None:
    base = load_profile(repo / "configs/hardware/h200.json")
    notes = "adapters fit; one process: the link is a guess"
    alone = replace(base, name="h100", notes=notes, gpus_per_node=1, collectives=(), stretch=1.0)
    found = datasheet_profiles.with_links(alone, base)
    assert found.notes == (
        "adapters fit; links and collectives are those of h200.json, not measured here"
    )
    assert found == replace(base, name="h100", notes=found.notes)
