"""A folder that could not be written at a job's end is refused before it trains, by name."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tlora_megatron.training.formats.peft import CONFIG_NAME
from tlora_megatron.training.run.job_admission import check_job_folders


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


@pytest.mark.parametrize("name", ["adapter", "checkpoints", "tensorboard"])
def test_a_file_in_the_place_of_a_folder(job: Path, name: str) -> None:
    (job / name).touch()
    with pytest.raises(ValueError, match=rf"^job 'a': .*/{name} must be a folder, got a file"):
        check(job)


def test_a_folder_in_the_place_of_the_metrics(job: Path) -> None:
    (job / "metrics.jsonl").mkdir()
    with pytest.raises(
        ValueError, match=r"^job 'a': .*/metrics.jsonl must be a file, got a folder"
    ):
        check(job)


def test_a_folder_of_something_else(job: Path) -> None:
    (job / "adapter").mkdir()
    (job / "adapter" / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"^job 'a': adapter directory must be empty or hold an"):
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
