"""The writer's order, and versions of adapters: written once, names that move forward only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.launch import HANG_S
from tlora_megatron.training.formats.atomic_directory import NotPermitted, always
from tlora_megatron.training.saving.writer import (
    AdapterVersion,
    Writer,
    publish,
    published_folder,
    versions_of,
)


def test_two_jobs_are_written_at_once_and_each_in_order() -> None:
    writer, both, done = Writer(), threading.Barrier(2), list[str]()

    def first(job: str) -> None:
        both.wait(HANG_S)  # breaks, and ends the writer, if the other one does not run meanwhile
        done.append(f"{job}1")

    for job in "ab":
        writer.submit(lambda job=job: first(job), job)  # type: ignore[misc]
        writer.submit(lambda job=job: done.append(f"{job}2"), job)  # type: ignore[misc]
    writer.close()
    assert [name for name in done if name[0] == "a"] == ["a1", "a2"]
    assert [name for name in done if name[0] == "b"] == ["b1", "b2"]


def test_task_of_no_job_has_all_before_it_and_none_beside_it() -> None:
    writer, gate, done = Writer(), threading.Event(), list[str]()

    def held() -> None:
        assert gate.wait(HANG_S)
        done.append("a")

    writer.submit(held, "a")
    writer.submit(lambda: done.append("all"))
    writer.submit(lambda: done.append("b"), "b")
    gate.set()
    writer.close()
    assert done == ["a", "all", "b"]


@pytest.fixture
def name(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "j1" / "sampler" / "latest"


def writer(text: str) -> Callable[[Path], int]:
    def write(folder: Path) -> int:
        folder.mkdir(parents=True)
        return (folder / "weights").write_text(text)

    return write


def test_a_version_is_written_once_and_its_name_moves_to_the_next(name: Path) -> None:
    jobs = name.parent.parent.parent
    assert publish(name, 3, writer("three"), always) == 5
    first = published_folder(name)
    assert first == AdapterVersion("j1", 3).folder(jobs)
    assert AdapterVersion.of(first) == AdapterVersion("j1", 3)
    assert publish(name, 3, writer("another"), always) == 0
    assert publish(name, 12, writer("twelve"), always) == 6
    assert ((name / "weights").read_text(), (first / "weights").read_text()) == ("twelve", "three")
    assert versions_of(name.parent.parent) == [AdapterVersion("j1", n) for n in (3, 12)]
    assert AdapterVersion.parse(str(AdapterVersion("j1", 12))) == AdapterVersion("j1", 12)
    assert AdapterVersion.of(name) is None


def test_a_request_that_is_carried_out_again_moves_no_name_back(name: Path) -> None:
    for number in (1, 2, 1):
        publish(name, number, writer(str(number)), always)
    assert (name / "weights").read_text() == "2"


def test_a_folder_from_before_gives_its_place_to_a_link(name: Path) -> None:
    writer("old")(name)
    publish(name, 1, writer("new"), always)
    assert name.is_symlink()
    assert (name / "weights").read_text() == "new"
    assert {path.name for path in name.parent.iterdir()} == {"latest", ".versions"}


def test_a_name_that_belongs_to_somebody_else_stays(name: Path) -> None:
    def refuse() -> None:
        raise NotPermitted("it is another's")

    publish(name, 1, writer("one"), always)
    with pytest.raises(NotPermitted):
        publish(name, 2, writer("two"), refuse)
    assert (name / "weights").read_text() == "one"
