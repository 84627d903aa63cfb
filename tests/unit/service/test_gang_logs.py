"""What gangs say and are told: logs, leases, last words, and the gangs that are over."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.engine_case import spec as gang_spec
from tlora_megatron.append_log import AppendLog, LineReader
from tlora_megatron.service.engines import base
from tlora_megatron.service.engines.base import PastGangs
from tlora_megatron.service.home import Home, Lease, make_folder, write_lease
from tlora_megatron.service.messages import Command, GangEvent, GangFolder, GangSpec
from tlora_megatron.service.worker import gang_logs
from tlora_megatron.service.worker.gang_logs import CommandReader, EventWriter


def command(seq: int, kind: str = "renew", job: str | None = None, epoch: int = 1) -> Command:
    body = {"lease": 3} if kind == "prepare" else {}
    return Command(gang="g", epoch=epoch, seq=seq, kind=kind, job=job, body=body)  # type: ignore[arg-type]


@pytest.fixture
def spec(tmp_path: Path) -> GangSpec:
    return gang_spec(tmp_path, lease_s=10.0)


@pytest.fixture
def folder(spec: GangSpec, tmp_path: Path) -> GangFolder:
    folder = GangFolder(tmp_path, spec.gang, spec.epoch)
    folder.create(spec)
    return folder


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(gang_logs, "now_s", lambda: now[0])
    return now


def test_torn_lines_wait_for_their_end_and_are_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    reader = LineReader(path)
    assert reader.read() == []
    one, two = command(1), command(2)
    AppendLog(path, Command, "seq").append(one, durable=True)
    with path.open("ab") as file:
        file.write(b"tor")
    assert reader.read() == [one.to_json()]
    assert not reader.has_more
    assert reader.read() == []
    AppendLog(path, Command, "seq").append(two, durable=False)
    assert reader.read() == [two.to_json()]
    assert path.read_text() == f"{one.to_json()}\n{two.to_json()}\n"


def test_folder_knows_its_own_path_and_spec(folder: GangFolder, spec: GangSpec) -> None:
    again = GangFolder.at(folder.path)
    assert (again.gang, again.epoch, again.path) == ("g", 1, folder.path)
    assert again.spec() == spec
    with pytest.raises(ValueError, match="NAME-EPOCH"):
        GangFolder.at(folder.path.parent)


def test_each_command_is_in_the_log_once(folder: GangFolder) -> None:
    reader, writer = folder.commands(), folder.commands()
    assert not reader.wait(0.0)

    def post() -> None:
        for seq in (1, 2, 2, 1, 3):
            writer.append(command(seq), durable=True)

    threading.Timer(0.05, post).start()
    assert reader.wait(60.0)
    taken = reader.after(0)
    while len(taken) < 3:
        taken += reader.after(taken[-1].seq)
    assert [each.seq for each in taken] == [1, 2, 3]
    assert reader.after(3) == []


@pytest.mark.parametrize("number", [0, 1, 2, 500, 998, 999, 1000])
def test_events_of_a_long_life_are_found_from_any_number(
    folder: GangFolder, spec: GangSpec, number: int
) -> None:
    path = folder.events().path
    with path.open("w") as file:
        for count in range(1, 1001):
            body = {"words": "x" * (count % 97 * 13)}
            event = GangEvent(
                gang="g", epoch=1, number=count, at=0.0, kind="note", job=None, body=body
            )
            file.write(event.to_json() + "\n")
        file.write('{"torn')
    reader = folder.events()
    last = reader.last()
    assert last is not None
    assert last.number == 1000
    assert [event.number for event in reader.after(number)] == list(range(number + 1, 1001))
    assert reader.after(1000) == []
    folder.events().append(replace(last, number=1001), durable=False)
    assert path.read_text().count("torn") == 0


def test_stopped_process_is_not_renewed_by_old_commands(
    folder: GangFolder, spec: GangSpec, now_s: list[float]
) -> None:
    log = folder.commands()
    reader = CommandReader(spec, folder.commands())
    now_s[0] += 9.0
    assert reader.take() == []
    log.append(command(1), durable=True)
    now_s[0] += 0.9
    assert [each["seq"] for each in reader.take()] == [1]
    assert reader.deadline.left_s == pytest.approx(9.1)  # from the look that found nothing
    log.append(command(2), durable=True)
    now_s[0] += 50.0
    assert reader.take() == [{"kind": "stop", "job": None, "body": {"save": False}, "seq": 0}]
    assert reader.wait(60.0)
    log.append(command(3), durable=True)
    assert reader.take()[0]["kind"] == "stop"


def test_job_is_written_only_under_its_lease(
    folder: GangFolder, spec: GangSpec, now_s: list[float]
) -> None:
    log = folder.commands()
    reader = CommandReader(spec, folder.commands())
    job = make_folder(Path(spec.root) / "jobs" / "j1")
    write_lease(job, Lease(gang="g", epoch=1, lease=3))
    assert not reader.may_write("j1")
    log.append(command(1, "prepare", "j1"), durable=True)
    log.append(command(2, "prepare", "j2", epoch=2), durable=True)
    assert [each["seq"] for each in reader.take()] == [1]
    assert reader.may_write("j1")
    assert not reader.may_write("j2")
    write_lease(job, Lease(gang="h", epoch=1, lease=4))
    assert not reader.may_write("j1")
    write_lease(job, Lease(gang="g", epoch=1, lease=3))
    assert reader.may_write("j1")
    now_s[0] += 11.0
    assert not reader.may_write("j1")


def test_events_that_the_disk_refuses_come_before_the_next_one(
    folder: GangFolder, spec: GangSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = EventWriter(spec, folder.events()), folder.events()
    writer.tell("started", None, {})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        writer.tell("saved", "j1", {})
        writer.tell("stepped", "j1", {})
        assert [event.kind for event in reader.after(1)] == []
    writer.tell("stepped", "j1", {})
    events = [(event.number, event.kind) for event in reader.after(1)]
    assert events == [(2, "saved"), (3, "stepped"), (4, "stepped")]


def test_damaged_line_is_a_gap_in_the_numbers(folder: GangFolder) -> None:
    reader, path = folder.events(), folder.events().path
    events = [
        GangEvent(gang="g", epoch=1, number=number, at=0.0, kind="note") for number in (1, 2, 3)
    ]
    lines = [event.to_json() for event in events]
    lines[1] = "\0" * 40
    path.write_text("".join(f"{line}\n" for line in lines))
    assert reader.after(0) == [events[0], events[2]]
    assert folder.events().after(1) == [events[2]]
    with path.open("a") as file:
        file.write("\0" * 40 + "\n")
    assert reader.last() == events[2]
    folder.events().append(replace(events[2], number=4), durable=False)
    assert [event.number for event in reader.after(3)] == [4]


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
