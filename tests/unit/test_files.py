"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tlora_megatron.files import (
    BY_UMASK,
    read_json,
    read_object,
    replacing,
    write_atomic,
    write_json,
)


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content in ("a", "ü", b"\xff"):
        write_atomic(path, content, durable=isinstance(content, str))
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("mode", [None, BY_UMASK])
def test_a_file_is_private_unless_it_is_to_be_as_the_umask_says(
    tmp_path: Path, mode: int | None
) -> None:
    path, plain = tmp_path / "x", tmp_path / "plain"
    plain.touch()
    write_atomic(path, "a", **({} if mode is None else {"mode": mode}))
    expected = 0o600 if mode is None else stat.S_IMODE(plain.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == expected


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    write_json(path, [1])
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, float("nan"))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, [2])
    assert (read_json(path), os.listdir(tmp_path)) == ([1], ["x.json"])


@pytest.mark.parametrize("where", ["permit", "block"])
def test_what_must_not_take_the_name_leaves_nothing(tmp_path: Path, where: str) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def refuse() -> None:
        assert len(os.listdir(tmp_path)) == 2, "the new file is there, under another name"
        raise PermissionError(where)

    def write() -> None:
        with replacing(path, permit=refuse if where == "permit" else None) as file:
            file.write(b"new")
            if where == "block":
                refuse()

    with pytest.raises(PermissionError, match=where):
        write()
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["x"])


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_atomic(link, "new")
    assert (target.read_text(), link.read_text()) == ("old", "new")


@pytest.mark.parametrize("text", ["{", "[1]", "1"])
def test_an_object_is_read_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    assert read_object(path) is None
    write_json(path, {"a": 1})
    assert read_object(path) == read_json(path) == {"a": 1}
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json must hold a JSON object, got"):
        read_object(path)
