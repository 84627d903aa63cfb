"""Changes of a run that trains: requests that are answered once, and kept for its next start."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.config.load import read_config
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.training.run import live_run as module
from tlora_megatron.training.run.live_run import (
    FILE_NAME,
    FOLDER,
    LiveChanges,
    LiveFolder,
    LiveRun,
    with_live_changes,
)
from tlora_megatron.training.run.output_dir import hold_output_dir


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


def test_a_request_is_answered_and_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    with hold_output_dir(tmp_path):
        folder = LiveFolder(tmp_path)
        assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700
        assert not folder.has_requests
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(LiveRun(tmp_path).ask({"kind": "cancel", "job": "a"}))
        )
        asking.start()
        while not folder.has_requests:
            asking.join(0.005)
            assert asking.is_alive(), "it must wait for an answer"
        (request,) = folder.take()
        assert request.body == {"kind": "cancel", "job": "a"}
        assert (folder.has_requests, folder.take()) == (False, [])
        folder.answer(request.number, {"step": 3})
        folder.close()  # at once: the run's last job may have been cancelled
        asking.join()
        assert answers == [{"step": 3}]
    assert not (tmp_path / FOLDER).exists()


def test_what_is_no_request_is_answered_too(tmp_path: Path) -> None:
    folder = LiveFolder(tmp_path)
    requests = tmp_path / FOLDER / "requests"
    (requests / "1").write_text("[1]")
    (requests / "2").write_text("{")
    (requests / "3").symlink_to("/etc/passwd")
    (requests / ".4.tmp").write_text("{}")  # is being written
    assert folder.take() == []
    assert sorted(os.listdir(requests)) == [".4.tmp"]
    assert sorted(os.listdir(tmp_path / FOLDER / "answers")) == ["1", "2", "3"]


def test_without_a_live_run_there_is_a_sentence(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a run must be training in .*, got none"):
            LiveRun(tmp_path)
        LiveFolder(tmp_path)  # left by one that was killed


def test_a_run_that_ends_answers_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALIVE_S", 0.0)
    with hold_output_dir(tmp_path):
        folder = LiveFolder(tmp_path)
        live = LiveRun(tmp_path)
        with pytest.raises(RuntimeError, match="has ended before it answered"):
            live.ask({"kind": "cancel", "job": "a"}, wait=lambda _: folder.close())


def test_a_link_in_the_folders_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / FOLDER).symlink_to(tmp_path / "mine")
    LiveFolder(tmp_path).close()
    assert (tmp_path / "mine" / "file").exists()
