"""Saving beside training: what is written is what the job was, in order, whatever happens."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from tests.helpers.launch import HANG_S
from tests.helpers.saver_case import (
    BUFFERS,
    SPEC,
    adapter,
    checkpoint,
    make_job,
    make_saver,
    whole_values,
)
from tlora_megatron.training import job_files
from tlora_megatron.training.formats.atomic_directory import NotPermitted, always
from tlora_megatron.training.formats.checkpoint import find_checkpoint
from tlora_megatron.training.formats.peft import load_adapter
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.saving.saver import Saver
from tlora_megatron.training.saving.snapshot import Arena, save_memory_numel
from tlora_megatron.training.saving.writer import (
    SAMPLED,
    AdapterVersion,
    Writer,
    WriterDied,
    publish,
    published_folder,
    settle,
    versions_of,
)


class Gate:
    """Holds the writer before each of its checkpoints until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.snapshots_open: list[int] = []
        self.saver: Saver | None = None
        write = job_files.write_checkpoint

        def held(*args: object) -> int:
            assert self.open.wait(HANG_S)
            if self.saver is not None:
                self.snapshots_open.append(sum(self.saver._open.values()))
            return write(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(job_files, "write_checkpoint", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def saved(folder: Path, job: JobState, step: int) -> dict[str, torch.Tensor]:
    path = folder / "jobs" / job.name / "checkpoints" / f"step_{step:08d}"
    return load_file(path / "adapter.safetensors") | load_file(path / "optimizer.safetensors")


def state(job: JobState) -> dict[str, torch.Tensor]:
    moments = {f"{b}.{n}": t for b in BUFFERS[1:] for n, t in whole_values(job, b).items()}
    return whole_values(job, "master") | moments


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def change(job: JobState) -> None:
    for buffer in job.adapter.slab.buffers().values():
        buffer.add_(1)
    job.step += 1


def test_files_are_those_of_safetensors_and_can_be_read(tmp_path: Path) -> None:
    job = make_job("a")
    job.step = 3
    saver = make_saver(job)
    saver.save(job, [checkpoint(tmp_path, job), adapter(tmp_path, job)])
    saver.close()
    folder = tmp_path / "jobs/a/checkpoints" / "step_00000003"
    weights = {name: t.contiguous() for name, t in whole_values(job, "master").items()}
    assert (folder / "adapter.safetensors").read_bytes() == save(weights)
    assert_same(saved(tmp_path, job, 3), state(job))
    found = find_checkpoint(folder.parent)
    assert found is not None
    again = make_job("a")
    for buffer in again.adapter.slab.buffers().values():
        buffer.zero_()
    found.restore(again)
    assert again.step == 3
    assert_same(state(again), state(job))
    assert_same(load_adapter(tmp_path / "jobs/a/adapter", model=SPEC).factors, weights)
    assert json.loads((folder / "state.json").read_text())["progress"]["step"] == 3


def test_a_step_and_the_end_of_the_job_change_nothing_saved(tmp_path: Path, gate: Gate) -> None:
    job, saver = make_job("a"), None
    saver = make_saver(job)
    expected = state(job)
    saver.save(job, [checkpoint(tmp_path, job)])
    change(job)
    job.adapter.slab.master.fill_(torch.nan)  # its memory is somebody else's now
    gate.open.set()
    saver.close()
    assert_same(saved(tmp_path, job, 0), expected)


def test_memory_for_one_is_enough_for_three(tmp_path: Path, gate: Gate) -> None:
    jobs = [make_job(name, rank=rank) for name, rank in (("a", 4), ("b", 3), ("c", 2))]
    saver = gate.saver = make_saver(*jobs, memory_gb=1e-9)
    saver._on_wait = gate.open.set  # those who watch for hangs are told of a wait
    expected = {}
    for _ in range(4):
        for job in jobs:
            saver.save(job, [checkpoint(tmp_path, job)])
            expected[job.name] = state(job)
        for job in jobs:
            change(job)
    saver.close()
    assert gate.snapshots_open == [1] * 12
    for job in jobs:
        assert_same(saved(tmp_path, job, 3), expected[job.name])


def test_with_memory_for_all_nobody_waits(tmp_path: Path, gate: Gate) -> None:
    jobs = [make_job(name) for name in "abc"]
    saver = gate.saver = make_saver(*jobs)
    for job in jobs:
        saver.save(job, [checkpoint(tmp_path, job)])  # the gate is closed
    gate.open.set()
    saver.close()
    assert gate.snapshots_open[0] == len(gate.snapshots_open) == 3


def test_a_job_due_again_waits_for_its_last_save(tmp_path: Path, gate: Gate) -> None:
    job, other = make_job("a"), make_job("b")
    saver = gate.saver = make_saver(job, other)
    first = state(job)
    saver.save(job, [checkpoint(tmp_path, job)])
    change(job)
    saver._on_wait = gate.open.set
    saver.save(job, [checkpoint(tmp_path, job)])
    assert gate.open.is_set()
    saver.close()
    assert gate.snapshots_open == [1, 1]
    assert_same(saved(tmp_path, job, 0), first)
    assert_same(saved(tmp_path, job, 1), state(job))


def test_a_full_disk_costs_the_save_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, errors = make_job("a"), list[Exception]()
    saver = make_saver(job)
    saver.save(job, [checkpoint(tmp_path, job, errors)])
    saver.drain()
    change(job)
    left, pwrite = 5000, os.pwrite

    def filling(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= len(data)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", filling)
    saver.save(job, [checkpoint(tmp_path, job, errors), adapter(tmp_path, job, errors)])
    saver._writer.drain()
    assert not errors  # told between rounds, not by the thread
    saver.report()
    assert ["No space left" in str(error) for error in errors] == [True, True]
    folder = tmp_path / "jobs/a/checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step_00000000"]
    assert not (tmp_path / "jobs/a/adapter").exists()
    monkeypatch.undo()
    saver.save(job, [checkpoint(tmp_path, job, errors)])
    saver.close()
    assert len(errors) == 2
    assert_same(saved(tmp_path, job, 1), state(job))
    assert (saver.times.writes, saver.times.written_bytes > 0) == (2, True)


def test_a_dead_writer_ends_the_next_save(tmp_path: Path) -> None:
    job = make_job("a")
    saver = make_saver(job)

    def broken() -> None:
        raise ArithmeticError("a bug")

    saver.submit(broken)
    with pytest.raises(WriterDied, match="the writer of checkpoints has ended: a bug"):
        saver.drain()
    with pytest.raises(WriterDied) as error:
        saver.save(job, [checkpoint(tmp_path, job)])
    assert isinstance(error.value.__cause__, ArithmeticError)
    with pytest.raises(WriterDied):
        saver.close()


def written(folder: Path) -> dict[str, tuple[int, int, int]]:
    """What a write would change of each file; reading may change when it was read."""
    found = ((path.name, path.stat()) for path in folder.iterdir())
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found}


def test_an_adapter_that_has_not_changed_stays(tmp_path: Path) -> None:
    job, errors = make_job("a"), list[Exception]()
    saver = make_saver(job)
    saver.save(job, [adapter(tmp_path, job, errors)])
    saver.drain()
    folder = tmp_path / "jobs/a/adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "hub/name"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text("mine")
    before = written(folder)
    saver.save(job, [adapter(tmp_path, job, errors)])
    saver.drain()
    assert written(folder) == before
    change(job)
    saver.save(job, [adapter(tmp_path, job, errors)])
    saver.close()
    assert not errors
    assert (folder / "README.md").read_text() == "mine"
    assert_same(load_adapter(folder, model=SPEC).factors, whole_values(job, "master"))
    assert json.loads((folder / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == "base"  # fmt: skip


def test_old_checkpoints_go_and_links_stay_unfollowed(tmp_path: Path) -> None:
    job, errors = make_job("a"), list[Exception]()
    saver, folder = make_saver(job), tmp_path / "jobs/a/checkpoints"
    for _ in range(2):
        saver.save(job, [checkpoint(tmp_path, job, errors)])
        change(job)
    saver.drain()
    moved = tmp_path / "elsewhere"
    (folder / "step_00000000").rename(moved)
    (folder / "step_00000000").symlink_to(moved)
    (folder / "step_00000001" / "notes").write_text("mine")
    for _ in range(2):
        saver.save(job, [checkpoint(tmp_path, job, errors)])
        change(job)
    saver.close()
    assert not errors
    assert len(list(moved.iterdir())) == 3
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step_00000001", "step_00000002", "step_00000003"]
    assert [path.name for path in (folder / "step_00000001").iterdir()] == ["notes"]
    found = find_checkpoint(folder)
    assert found is not None
    assert found.step == 3


def test_a_job_that_comes_later_finds_room(tmp_path: Path, gate: Gate) -> None:
    small, large = make_job("a", rank=2), make_job("b", rank=16)
    saver, told = make_saver(small), list[str]()
    saver.expect(large.spec.lora)
    saver.save(large, [checkpoint(tmp_path, large)._replace(on_done=lambda: told.append("saved"))])
    assert not saver.can_take(large), "its last save is not written yet"
    assert not saver.can_take(small), "the memory is taken"
    saver.submit(on_done=lambda: saver.submit(on_done=lambda: told.append("told")))
    gate.open.set()
    saver.drain()
    assert told == ["saved", "told"]
    assert saver.can_take(small)
    assert saver.can_take(large)
    saver.close()


def test_ranges_do_not_meet_and_are_used_again() -> None:
    arena, taken, random_ = Arena(1000), list[range](), random.Random(0)
    for _ in range(500):
        if taken and random_.random() < 0.5:
            arena.give_back(taken.pop(random_.randrange(len(taken))))
        elif (new := arena.take(random_.randint(1, 400))) is not None:
            assert 0 <= new.start < new.stop <= arena.numel
            assert all(new.stop <= old.start or old.stop <= new.start for old in taken)
            taken.append(new)
    for held in taken:
        arena.give_back(held)
    assert arena.take(1000) == range(1000)
    assert arena.take(1) is None


def test_more_than_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="numel must be at most 128, got 129"):
        Arena(100).take(129)


@pytest.mark.parametrize(
    ("memory_gb", "numel"), [(1.0, 640 + 6400), (1e-5, 6400), (26e-6, 6500), (1e-12, 6400)]
)
def test_all_jobs_once_but_no_more_than_allowed(memory_gb: float, numel: int) -> None:
    """The largest always finds room; an idle host has room for all."""
    assert save_memory_numel([640, 6337], memory_gb) == numel
    assert save_memory_numel([64, 64], None) == 128


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
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / "weights").write_text(text)

    return write


def test_a_version_is_written_once_and_its_name_moves_to_the_next(name: Path) -> None:
    jobs = name.parent.parent.parent
    assert publish(name, 3, writer("three"), always) == 5
    first = published_folder(name)
    assert first == AdapterVersion("j1", 3).folder(jobs)
    assert AdapterVersion.of(first) == AdapterVersion("j1", 3)
    assert publish(name, 12, writer("twelve"), always) == 6
    (first / "weights").write_text("")  # the machine fell before it was on the disk
    assert publish(name, 3, writer("three"), always) == 5
    settle(name, 3, always)
    assert publish(name, 3, writer("another"), always) == 0
    assert ((name / "weights").read_text(), (first / "weights").read_text()) == ("twelve", "three")
    assert versions_of(name.parent.parent) == [AdapterVersion("j1", n) for n in (3, 12)]
    assert AdapterVersion.parse(str(AdapterVersion("j1", 12))) == AdapterVersion("j1", 12)
    assert AdapterVersion.of(name) is None
    assert AdapterVersion("j1", 12).sampled_folder(jobs) == published_folder(name)
    writer("bf16")(name / SAMPLED)
    assert AdapterVersion("j1", 12).sampled_folder(jobs) == published_folder(name) / SAMPLED


def test_a_version_that_can_only_be_sampled_is_not_settled(name: Path) -> None:
    publish(name, 1, lambda folder: writer("bf16")(folder / SAMPLED), always)
    settle(name, 1, always)
    assert publish(name, 1, writer("whole"), always) == 5
    settle(name, 1, always)
    assert publish(name, 1, writer("whole"), always) == 0


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
