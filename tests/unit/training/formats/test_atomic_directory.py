"""A directory is replaced as a whole: killed at any system call, the old or the new one stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tlora_megatron.training.formats import atomic_directory
from tlora_megatron.training.formats.atomic_directory import readable_directory, replace_directory

STEPS = ("fsync", "rename", "mkdir", "rmdir", "unlink")


def write(directory: Path, text: str) -> None:
    with replace_directory(directory) as incoming:
        (incoming / "first").write_text(text)
        (incoming / "second").write_text(text)


def read(directory: Path) -> tuple[str, str]:
    found = readable_directory(directory)
    return (found / "first").read_text(), (found / "second").read_text()


@pytest.fixture(params=["exchange", "two_renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to give the new directory its name."""
    if request.param == "two_renames":
        monkeypatch.setattr(atomic_directory, "_exchange", lambda first, second: False)
    return request.param


def test_writes_and_replaces(tmp_path: Path, swap: str) -> None:
    directory = tmp_path / "deep" / "adapter"
    for text in ("one", "two", "three"):
        write(directory, text)
        assert read(directory) == (text, text)
    assert [path.name for path in directory.parent.iterdir()] == ["adapter"]


def test_exception_leaves_the_old_one(tmp_path: Path, swap: str) -> None:
    write(tmp_path / "adapter", "old")
    with pytest.raises(OSError, match="disk full"):
        _write_half(tmp_path / "adapter")
    assert read(tmp_path / "adapter") == ("old", "old")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def _write_half(directory: Path) -> None:
    with replace_directory(directory) as incoming:
        (incoming / "first").write_text("half")
        raise OSError("disk full")


def test_killed_at_any_system_call(tmp_path: Path, swap: str) -> None:
    """Kills a child before its n-th system call, for every n, until one child reaches the end."""
    directory = tmp_path / "adapter"
    write(directory, "start")
    last, outcomes = "start", set()
    for count in range(100):
        text = f"new{count}"
        killed = _write_killed_before(directory, text, count)
        left = read(directory)
        assert left in ((last, last), (text, text)), f"call {count}"
        outcomes.add("new" if left[0] == text else "old")
        last = left[0]
        if not killed:
            break
    assert not killed
    assert outcomes == {"old", "new"}
    assert count > 8
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def _write_killed_before(directory: Path, text: str, count: int) -> bool:
    """Writes in a child that dies, without any clean-up, before system call number `count`."""
    child = os.fork()
    if child == 0:
        calls = 0

        def dying(call: Callable[..., object]) -> Callable[..., object]:
            def counted(*args: object, **kwargs: object) -> object:
                nonlocal calls
                if calls == count:
                    os._exit(9)
                calls += 1
                return call(*args, **kwargs)

            return counted

        for name in STEPS:
            setattr(os, name, dying(getattr(os, name)))
        atomic_directory._exchange = dying(atomic_directory._exchange)
        try:
            write(directory, text)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


def test_exchange_is_used_where_it_can_be(tmp_path: Path) -> None:
    """On this file system or not, the outcome is an exchange or an honest False."""
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    (first / "mark").touch()
    exchanged = atomic_directory._exchange(first, second)
    assert (second / "mark").exists() is exchanged
    assert (first / "mark").exists() is not exchanged
    assert not atomic_directory._exchange(first, tmp_path / "missing")
