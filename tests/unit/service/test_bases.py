"""Bases by name: what `--base` takes, and what the folder remembers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tlora_megatron.config.reader import ConfigError
from tlora_megatron.service.home import Home
from tlora_megatron.service.settings import declare_bases, read_bases


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A service's folder beside a base."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps({}))
    return Home.open(tmp_path / "service")


def test_names_are_remembered_and_a_later_word_counts(home: Home, tmp_path: Path) -> None:
    assert read_bases(home) == {}
    declare_bases(home, [f"org/base-1.0={tmp_path}/base"])
    text = tmp_path / "base.yaml"
    text.write_text("base_model: {path: base, dtype: float32}\n")
    declare_bases(home, [f"exact={text}", f"org/base-1.0={tmp_path}/base"])
    declare_bases(home, [])
    found = read_bases(home)
    assert sorted(found) == ["exact", "org/base-1.0"]
    assert {base.path for base in found.values()} == {str(tmp_path / "base")}
    assert found["exact"].dtype == "float32"


@pytest.mark.parametrize("word", ["base", "=base", "../x={tmp}/base", "a b={tmp}/base", "a="])
def test_what_is_no_name(home: Home, tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError, match=r"--base must be NAME=DIR or NAME=FILE\.yaml"):
        declare_bases(home, [word.format(tmp=tmp_path)])


def test_a_base_must_be_there_and_all_are_added_or_none(home: Home, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be an existing directory"):
        declare_bases(home, [f"good={tmp_path}/base", f"bad={tmp_path}/nowhere"])
    assert read_bases(home) == {}
