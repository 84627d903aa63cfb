"""Gangs that are over: they are heard for a while, and their folders go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlora_megatron.service.engines import base
from tlora_megatron.service.engines.base import PastGangs
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import GangEvent, GangFolder


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home.open(tmp_path)
    for age_days, name in enumerate(("g1-1", "g1-2", "g2-1")):
        (home.gangs / name).mkdir()
        at_s = (home.gangs / name).stat().st_mtime - 3 * 86400 * age_days - 60
        os.utime(home.gangs / name, (at_s, at_s))
    return home


def names(home: Home) -> list[str]:
    return sorted(path.name for path in home.gangs.iterdir())


def test_folders_go_after_a_week_or_when_there_are_many(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    gangs = PastGangs(home)
    gangs.sweep(())
    monkeypatch.setattr(base, "_KEEP_S", 5 * 86400.0)
    gangs.sweep(())
    assert len(names(home)) == 3, "it was swept a moment ago"
    gangs.remove_old({("g2", 1)})
    assert len(names(home)) == 3, "one that an engine has stays, however old"
    gangs.remove_old(())
    assert names(home) == ["g1-1", "g1-2"]
    monkeypatch.setattr(base, "_KEEP", 1)
    gangs.remove_old(())
    assert names(home) == ["g1-1"]


def test_strange_names_are_left_alone(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    (home.gangs / "notes.txt").write_text("mine")
    (home.gangs / "no gang-1").mkdir()
    assert [folder.epoch for folder in GangFolder.all_of(home)] == [1, 2, 1]
    assert "notes.txt is no gang's folder: it is left alone" in caplog.text
    assert "no gang-1 is no gang's folder" in caplog.text


def test_past_gangs_are_read_behind_a_cursor(home: Home) -> None:
    gangs, folder = PastGangs(home), GangFolder(home.root, "g1", 1)
    events = [
        GangEvent(gang="g1", epoch=1, number=number, at=0.0, kind="note") for number in (1, 2)
    ]
    for event in events:
        folder.events().append(event, durable=False)
    assert gangs.events({("g1", 1): 1}, ()) == events[1:]
    assert gangs.events({("g1", 1): 0, ("gone", 7): 0}, ()) == events
    assert gangs.events({("g1", 1): 0}, {("g1", 1)}) == []
