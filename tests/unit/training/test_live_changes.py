"""Changes of a run while it trained are there when it is started again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.config.load import read_config
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.training.live_run import FILE_NAME, LiveChanges, with_live_changes


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "base").mkdir()
    (tmp_path / "data").write_text('{"text": "x"}\n')
    document: dict[str, Any] = {
        "base_model": {"path": "base"},
        "run": {"output_dir": str(tmp_path / "out"), "portion_tokens": 64},
        "jobs": [{"name": n, "data": {"train": "data"}, "max_steps": 1} for n in ("a", "b")],
    }
    (tmp_path / "out").mkdir()
    return read_config(document, tmp_path)


def _names(config: RunConfig) -> list[str]:
    return [job.name for job in config.jobs]


def test_added_jobs_come_back_and_cancelled_ones_stay_out(config: RunConfig) -> None:
    out = Path(config.run.output_dir)
    late = replace(config.jobs[0], name="late", portion_tokens=None)
    changes = LiveChanges.read(out)
    changes.add(late)
    changes.cancel("a")
    changes.write(out)
    assert with_live_changes(config) == (config, ())  # no run lies there
    (out / "config.json").touch()
    again, notes = with_live_changes(config)
    assert _names(again) == ["b", "late"]
    assert again.jobs[-1] == replace(late, portion_tokens=64)
    assert len(notes) == 2
    own = replace(config, jobs=(*config.jobs, replace(late, max_steps=7)))  # the user has put it in
    assert [job.max_steps for job in with_live_changes(own)[0].jobs] == [1, 7]


def test_a_cancelled_job_that_is_added_again_is_cancelled_no_more(config: RunConfig) -> None:
    out = Path(config.run.output_dir)
    (out / "config.json").touch()
    changes = LiveChanges()
    changes.cancel("a")
    changes.cancel("a")
    changes.add(replace(config.jobs[0], max_steps=5))
    changes.write(out)
    assert LiveChanges.read(out) == changes
    assert _names(with_live_changes(config)[0]) == ["a", "b"]


def test_nothing_left_or_a_damaged_file_is_refused(config: RunConfig) -> None:
    out = Path(config.run.output_dir)
    (out / "config.json").touch()
    LiveChanges(cancelled=["a", "b"]).write(out)
    with pytest.raises(ConfigError, match=r"jobs must hold at least one .* job b was cancelled"):
        with_live_changes(config)
    (out / FILE_NAME).write_text("[]")
    with pytest.raises(ConfigError, match=r"live_changes.json must hold what was changed"):
        with_live_changes(config)
