"""`tlora doctor`: each thing that can be wrong is found, with what to do."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import update

from tests.helpers.commands import Tlora
from tests.helpers.http_service import listening, open_api
from tlora_megatron.cli import doctor
from tlora_megatron.service.front import Place, listen
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import open_store, tables


class _Disk(NamedTuple):
    total: int
    free: int


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A service whose store is whole and that nobody serves."""
    home = Home.open(tmp_path / "service")
    open_store(home.store).close()
    return home.root


def found(root: Path, check: str) -> tuple[str, str, str]:
    """The worst finding of a name: its level, what was found, and what to do."""
    rows = [row for row in doctor.examine(root) if row.check == check]
    levels = ("ok", "look", "wrong")
    return max((row[1:] for row in rows), key=lambda row: levels.index(row[0]))


def change_version(root: Path, by: int) -> None:
    with open_store(root / "store.sqlite") as store, store.database.write() as connection:
        version = tables.schema_version.c.version
        connection.execute(update(tables.schema_version).values(version=version + by))


def test_a_whole_service_is_well(root: Path, tlora: Tlora, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    told = tlora.json("doctor", root)
    assert told["ok"] is True
    (store,) = (row for row in told["checks"] if row["check"] == "store")
    assert (store["level"], store["found"]) == ("ok", "whole; no controller runs")
    assert "none in" in tlora("doctor", root.parent / "none")
    assert not (root.parent / "none").exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no driver is loaded; exit 9", "nvidia-smi fails: no driver is loaded"),
        ("echo NVIDIA H200, 580.95", "sees no GPU"),
    ],
)
def test_what_is_wrong_is_an_exit_code(
    root: Path, tmp_path: Path, tlora: Tlora, monkeypatch: Any, script: str, words: str
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert words in tlora("doctor", root, code=1)


@pytest.mark.parametrize(
    ("name", "version", "level", "words"),
    [
        ("torch", "1.0", "wrong", "must be <3,>=2.11, got 1.0"),
        ("torch", None, "wrong", "not installed"),
        ("peft", "0.1", "look", "must be >=0.17, got 0.1"),
        ("peft", None, "ok", "not installed"),
    ],
)
def test_versions_are_held_against_the_declared_ranges(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    version: str | None,
    level: str,
    words: str,
) -> None:
    real = metadata.version

    def of(asked: str) -> str:
        if asked == name and version is None:
            raise metadata.PackageNotFoundError(asked)
        return str(version) if asked == name else real(asked)

    monkeypatch.setattr(metadata, "version", of)
    assert found(root, name)[:2] == (level, words)
    assert bool(found(root, name)[2]) is (level != "ok")


@pytest.mark.parametrize(
    ("harm", "check", "level", "words"),
    [
        ("newer", "store", "wrong", "its tables have version"),
        ("older", "store", "look", "its tables have version"),
        ("damaged", "store", "wrong", "store.sqlite"),
        ("library", "store", "wrong", "tlora_megatron.service.store"),
        ("beat", "store", "look", "gave a sign of life"),
        ("open", "service", "wrong", "must be closed to other users"),
        ("full", "disk", "wrong", "0 GiB free"),
        ("tight", "disk", "look", "5 GiB free"),
        ("tight", "/dev/shm", "look", "0.5 GiB"),
        ("name", "name", "wrong", "unknown"),
        ("port", "port", "look", "another program has"),
    ],
)
def test_trouble_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch, harm: str, check: str, level: str, words: str
) -> None:
    gib = 1 << 30
    if harm in ("newer", "older"):
        change_version(root, 1 if harm == "newer" else -1)
    elif harm == "damaged":
        (root / "store.sqlite").write_bytes(b"no database" * 1000)
    elif harm == "beat":
        with open_store(root / "store.sqlite", clock=lambda: 1000.0) as store:
            store.lock.take()
            store.database.fence = None
    elif harm == "library":
        monkeypatch.setitem(sys.modules, "tlora_megatron.service.store", None)
    elif harm == "open":
        root.chmod(0o755)
    elif harm in ("full", "tight"):
        disk = _Disk(gib // 2, 0 if harm == "full" else 5 * gib)
        monkeypatch.setattr("shutil.disk_usage", lambda path: disk)
    elif harm == "name":

        def unknown(*words: object) -> None:
            raise OSError("unknown")

        monkeypatch.setattr("socket.getaddrinfo", unknown)
    with listen(Place("127.0.0.1", 0)) as taken:
        if harm == "port":
            monkeypatch.setattr(doctor, "_WAIT_S", 0.1)
            monkeypatch.setattr(doctor, "PORT", taken.getsockname()[1])
        got = found(root, check)
    assert got[0] == level
    assert words in got[1]
    assert got[2], "it says what to do"


def test_a_service_that_answers_has_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_api(tmp_path / "s") as api, listening(api.app) as address:
        monkeypatch.setattr(doctor, "PORT", int(address.rpartition(":")[2]))
        port = doctor.PORT
        level, words, _ = found(tmp_path, "port")
        assert (level, words) == ("look", f"a service answers at {port}, and not ready: controller")
