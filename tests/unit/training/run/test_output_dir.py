"""Folders of a run, refused before training if not its own, and requests that change the run."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.config.load import config_to_dict, read_config
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunConfig, RunSpec
from tlora_megatron.training.formats.peft import CONFIG_NAME
from tlora_megatron.training.run import output_dir as module
from tlora_megatron.training.run.output_dir import (
    FILE_NAME,
    FOLDER,
    LiveChanges,
    LiveFolder,
    LiveRun,
    claim_output_dir,
    hold_output_dir,
    make_output_dir,
    with_live_changes,
)
from tlora_megatron.training.run.reading import check_job_folders


def test_a_directory_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    refused = pytest.raises(
        ValueError, match=r"run.output_dir must not be in use, got .* another run"
    )
    with hold_output_dir(tmp_path), refused, hold_output_dir(tmp_path):
        pass
    with pytest.raises(RuntimeError, match="inside"), hold_output_dir(tmp_path):
        raise RuntimeError("inside")
    with hold_output_dir(tmp_path):
        pass


def config_for(output_dir: Path, **run: Any) -> RunConfig:
    return RunConfig(
        base_model=BaseModelSpec(path="base"),
        parallel=ParallelSpec(),
        run=RunSpec(output_dir=str(output_dir), **run),
        jobs=(),
    )


def test_a_folder_is_made_by_a_run_that_begins_alone(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    assert not claim_output_dir(folder, config_for(folder))
    assert not list(tmp_path.iterdir())
    make_output_dir(folder)
    assert folder.is_dir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=f"run.output_dir must be writable, got {link}: "):
        claim_output_dir(link, config_for(link))
    with pytest.raises(ValueError, match=f"run.output_dir must be writable, got {link}: "):
        make_output_dir(link)


def test_checkpoints_without_their_configuration_are_not_written_over(tmp_path: Path) -> None:
    assert not claim_output_dir(tmp_path, config_for(tmp_path))
    step = tmp_path / "jobs" / "a" / "checkpoints" / "step_00000004"
    step.mkdir(parents=True)
    with pytest.raises(ValueError, match=f"got {tmp_path} with {step} but without its config.json"):
        claim_output_dir(tmp_path, config_for(tmp_path))


@pytest.mark.parametrize("earlier_version", [False, True])
def test_another_quantization_must_be_allowed(tmp_path: Path, earlier_version: bool) -> None:
    config = config_for(tmp_path)
    held = config_to_dict(config)
    if earlier_version:
        for key in ("quantization", "unquantised", "allow_change"):
            del held["base_model"][key]
    (tmp_path / "config.json").write_text(json.dumps(held))
    assert claim_output_dir(tmp_path, config)
    fp8 = replace(config, base_model=replace(config.base_model, quantization="fp8"))
    with pytest.raises(ValueError, match=r"quantization null instead of .fp8.; base_"):
        claim_output_dir(tmp_path, fp8)
    partly = replace(fp8.base_model, unquantised=("embed_tokens", "lm_head", "down_proj"))
    with pytest.raises(ValueError, match="allow_change: true lets its jobs go on"):
        claim_output_dir(tmp_path, replace(fp8, base_model=partly))
    allowed = replace(fp8, base_model=replace(fp8.base_model, allow_change=True))
    assert claim_output_dir(tmp_path, allowed)
    seeded = replace(allowed, base_model=replace(allowed.base_model, seed=1))
    with pytest.raises(ValueError, match="over another base_model: seed 0 instead of 1"):
        claim_output_dir(tmp_path, seeded)


def test_a_run_goes_on_over_the_same_base_alone(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"got .* with a config.json that is no run's"):
        claim_output_dir(tmp_path, config)
    base = {**config_to_dict(config)["base_model"], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({"base_model": base}))
    said = "with a run over another base_model: dtype 'float32' instead of 'bfloat16'$"
    with pytest.raises(ValueError, match=said):
        claim_output_dir(tmp_path, config)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "out" / "jobs" / "a"
    folder.mkdir(parents=True)
    return folder


def check(job: Path) -> None:
    check_job_folders(job.parents[1], job.name)


def test_nothing_there_an_empty_one_and_an_earlier_adapter_are_fine(job: Path) -> None:
    check_job_folders(job.parents[2] / "new", "a")
    check(job)
    (job / "adapter").mkdir()
    check(job)
    (job / "adapter" / CONFIG_NAME).touch()
    (job / "adapter" / "README.md").touch()
    check(job)


@pytest.mark.parametrize(
    ("name", "is_file", "message"),
    [
        ("adapter", True, ".*/adapter must be a folder, got a file"),
        ("checkpoints", True, ".*/checkpoints must be a folder, got a file"),
        ("tensorboard", True, ".*/tensorboard must be a folder, got a file"),
        ("metrics.jsonl", False, ".*/metrics.jsonl must be a file, got a folder"),
        ("adapter/model.gguf", True, "adapter directory must be empty or hold an"),
    ],
)
def test_something_else_in_its_place(job: Path, name: str, is_file: bool, message: str) -> None:
    (job / name).parent.mkdir(exist_ok=True)
    (job / name).touch() if is_file else (job / name).mkdir()
    with pytest.raises(ValueError, match=rf"^job 'a': {message}"):
        check(job)


@pytest.mark.parametrize("place", ["", "adapter", "checkpoints"])
def test_a_link_that_leads_elsewhere(job: Path, tmp_path: Path, place: str) -> None:
    job.rmdir()
    (tmp_path / "elsewhere").mkdir()
    link = job / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"^job 'a': .* must be a folder of its own, got a symb"):
        check(job)


def test_a_folder_that_cannot_be_written(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job / "adapter").mkdir()
    make = tempfile.TemporaryFile

    def refuse(dir: Path) -> object:
        if dir.name == "adapter":
            raise OSError(30, "Read-only file system")
        return make(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"^job 'a': .*/adapter must be writable, got: .*Read"):
        check(job)


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
