"""User-named files are opened below a root only, and through no link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlora_megatron.files import UserFiles


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root" / "a"
    folder.mkdir(parents=True)
    (folder / "data.jsonl").write_text("inside")
    (tmp_path / "outside").write_text("secret")
    return tmp_path / "root"


def test_a_file_and_a_folder_below_the_root(root: Path) -> None:
    files = UserFiles(root)
    with files.open_file(root / "a" / "data.jsonl", "data.train") as file:
        assert file.read() == b"inside"
    with files.open_folder(root / "a", "init_from") as folder:
        assert os.listdir(folder) == ["data.jsonl"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("{root}/../outside", r"must not go up with \.\."),
        ("{root}/a/../../outside", r"must not go up with \.\."),
        ("{top}/outside", r"must be a path below"),
        ("/etc/passwd", r"must be a path below"),
        ("a/data.jsonl", r"must be a path below"),
        ("{root}2/x", r"must be a path below"),
        ("{root}", r"got that folder itself"),
        ("{root}/a\0b", r"must hold no null character"),
        ("{root}/link", r"links are not followed"),
        ("{root}/linked/outside", r"links are not followed"),
        ("{root}/inner/data.jsonl", r"links are not followed"),
        ("{root}/a", r"must be a regular file"),
        ("{root}/fifo", r"must be a regular file"),
        ("{root}/missing", r"No such file"),
        ("{root}/a/data.jsonl/x", r"must be a file that can be read"),
    ],
)
def test_what_leads_elsewhere_is_refused(root: Path, name: str, error: str) -> None:
    (root / "link").symlink_to(root.parent / "outside")
    (root / "linked").symlink_to(root.parent)
    (root / "inner").symlink_to(root / "a")  # even one that stays inside
    os.mkfifo(root / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=error) as caught:
        UserFiles(root).open_file(name.format(root=root, top=root.parent), "data.train of job 'x'")
    assert str(caught.value).startswith("data.train of job 'x' must ")
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_root_links_are_followed(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "outside")
    with UserFiles().open_file(root / "link", "data.train") as file:
        assert file.read() == b"secret"
    with pytest.raises(ValueError, match="be a folder that can be read"):
        UserFiles().open_folder(root / "link", "init_from").__enter__()
