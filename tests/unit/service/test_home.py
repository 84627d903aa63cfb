"""The service's folder: modes, names, atomic files, leases."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tlora_megatron.files import read_json, write_json
from tlora_megatron.service import home as home_module
from tlora_megatron.service.home import Home, Lease, read_lease, write_lease


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_and_its_files_are_the_users_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        home = Home.open(tmp_path / "new" / "service")
        write_json(home.root / "x.json", {"a": 1})
    finally:
        os.umask(old)
    for folder in (home.root, home.jobs, home.gangs, home.tokens, home.standby):
        assert _mode(folder) == 0o700
    assert _mode(home.root / "x.json") == 0o600
    assert read_json(home.root / "x.json") == {"a": 1}
    assert read_json(home.root / "y.json") is None


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_SERVICE", str(tmp_path / "env"))
    assert Home.open().root == tmp_path / "env"


def test_an_open_or_foreign_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=r"closed to other users, got .* mode 0755; chmod 700"):
        Home.open(tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--service must be a folder that can be used"):
        Home.open(tmp_path / "file")
    monkeypatch.setattr(home_module.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match=r"folder of your own"):
        Home.open(tmp_path)


@pytest.mark.parametrize("name", ["", "..", "j/../x", "j1\n", "J1", "/etc", "j1/.."])
def test_only_ids_of_the_store_name_folders(name: str) -> None:
    home = Home(Path("/r"))
    assert home.job("j1a") == Path("/r/jobs/j1a")
    assert home.gang("g-1", 3) == Path("/r/gangs/g-1-3")
    with pytest.raises(ValueError, match="must match"):
        home.job(name)


def test_a_lease_is_read_back_and_a_damaged_one_is_nobodys(tmp_path: Path) -> None:
    assert read_lease(tmp_path) is None
    lease = Lease(gang="g1", epoch=2, lease=3)
    write_lease(tmp_path, lease)
    assert read_lease(tmp_path) == lease
    for damaged in ("", "[]", '{"gang":"g1"}', '{"gang":"g1","epoch":"x","lease":1}'):
        (tmp_path / "lease.json").write_text(damaged)
        assert read_lease(tmp_path) is None
