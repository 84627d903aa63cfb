"""Requests to a live run: files that only its user can open, answered once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tlora_megatron.training import live_run as module
from tlora_megatron.training.live_run import FOLDER, LiveFolder, LiveRun
from tlora_megatron.training.run.output_dir import hold_output_dir


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
        asking.join()
        assert answers == [{"step": 3}]
        folder.close()
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
