"""Folders replaced as a whole, whenever they are killed, and files byte by byte those of
safetensors.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from tlora_megatron.training.formats import atomic_directory, safetensors_file
from tlora_megatron.training.formats.atomic_directory import (
    NotPermitted,
    readable_directory,
    remove_directory,
    remove_leftovers,
    replace_directory,
)
from tlora_megatron.training.formats.safetensors_file import (
    PendingTensor,
    Scratch,
    holds_tensors,
    write_tensors,
)

STEPS = ("fsync", "rename", "mkdir", "rmdir", "unlink")
NAMES = ("first", "second")
"""Names of ours; the second is the mark without which nobody reads the directory."""


def write(directory: Path, text: str, names: tuple[str, ...] = ()) -> None:
    with replace_directory(directory, names) as incoming:
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


def _write_half(directory: Path) -> None:
    with replace_directory(directory) as incoming:
        (incoming / "first").write_text("half")
        raise OSError("disk full")


def test_exception_leaves_the_old_one(tmp_path: Path, swap: str) -> None:
    write(tmp_path / "adapter", "old")
    with pytest.raises(OSError, match="disk full"):
        _write_half(tmp_path / "adapter")
    assert read(tmp_path / "adapter") == ("old", "old")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.slow
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


def _write_killed_before(
    directory: Path, text: str, count: int, names: tuple[str, ...] = ()
) -> bool:
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
            write(directory, text, names)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory of ours with a user's files in it."""
    directory = tmp_path / "adapter"
    write(directory, "start", NAMES)
    (directory / "README.md").write_text("mine")
    (directory / ".git").mkdir()
    (directory / ".git" / "HEAD").write_text("ref")
    return directory


def others(directory: Path) -> tuple[str, str]:
    return (directory / "README.md").read_text(), (directory / ".git" / "HEAD").read_text()


def test_a_users_files_are_not_touched(shared: Path, swap: str) -> None:
    numbers = [path.stat().st_ino for path in (shared, shared / "README.md", shared / ".git")]
    write(shared, "new", NAMES)
    assert read(shared) == ("new", "new")
    assert others(shared) == ("mine", "ref")
    assert numbers == [
        path.stat().st_ino for path in (shared, shared / "README.md", shared / ".git")
    ]
    assert [path.name for path in shared.parent.iterdir()] == ["adapter"]


@pytest.mark.slow
def test_killed_beside_a_users_files(shared: Path, swap: str) -> None:
    """At any system call the mark is missing or goes with its file, and the others stay."""
    last = "start"
    for count in range(100):
        text = f"new{count}"
        killed = _write_killed_before(shared, text, count, NAMES)
        assert others(shared) == ("mine", "ref")
        if (shared / "second").exists():
            assert read(shared) in ((last, last), (text, text)), f"call {count}"
        last = (shared / "first").read_text()
        if not killed:
            break
    assert not killed
    assert read(shared) == (text, text)
    assert [path.name for path in shared.parent.iterdir()] == ["adapter"]


def test_a_users_file_in_what_a_crash_left_comes_home(tmp_path: Path, swap: str) -> None:
    """It came into the old directory between the last look and the exchange."""
    old = tmp_path / ".adapter.0123abcd.incoming"
    old.mkdir()
    (old / "first").write_text("old")
    (old / "README.md").write_text("mine")
    write(tmp_path / "adapter", "new", NAMES)
    assert read(tmp_path / "adapter") == ("new", "new")
    assert (tmp_path / "adapter" / "README.md").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("names", [(), NAMES])
@pytest.mark.parametrize("link", ["adapter", ".adapter.0123abcd.incoming", ".adapter.previous"])
def test_links_not_followed(tmp_path: Path, swap: str, link: str, names: tuple[str, ...]) -> None:
    target = tmp_path / "elsewhere" / "step"
    write(target, "precious")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / link).symlink_to(target)
    write(folder / "adapter", "new", names)
    assert not (folder / "adapter").is_symlink()
    assert read(folder / "adapter") == ("new", "new")
    assert read(target) == ("precious", "precious")
    assert [path.name for path in folder.iterdir()] == ["adapter"]


def test_a_link_above_the_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    write(tmp_path / "out" / "adapter", "new")
    assert read(tmp_path / "disk" / "adapter") == ("new", "new")


def test_a_file_in_the_place_of_the_directory_stays(tmp_path: Path) -> None:
    (tmp_path / "adapter").write_text("mine")
    with pytest.raises(NotADirectoryError, match="must be a directory, got a file"):
        write(tmp_path / "adapter", "new")
    assert (tmp_path / "adapter").read_text() == "mine"


def test_removing_takes_what_is_ours_and_no_link(tmp_path: Path) -> None:
    for name in ("ours", "shared", "target", ".step_1.0123abcd.incoming"):
        write(tmp_path / name, "text")
    (tmp_path / "shared" / "notes").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / ".step_2.0123abcd.incoming").symlink_to(tmp_path / "target")
    for name in ("ours", "shared", "link"):
        remove_directory(tmp_path / name, NAMES)
    remove_leftovers(tmp_path, "step_*", NAMES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shared", "target"]
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["notes"]
    assert read(tmp_path / "target") == ("text", "text")


def test_who_may_not_write_leaves_the_old_one(tmp_path: Path) -> None:
    home, asked = tmp_path / "home", [0]
    with replace_directory(home) as folder:
        (folder / "file").write_text("old")

    def permit() -> None:
        asked[0] += 1
        if asked[0] == 2:  # while the new files were written
            raise NotPermitted("another owns it")

    with pytest.raises(NotPermitted), replace_directory(home, permit=permit) as folder:
        (folder / "file").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert (home / "file").read_text() == "old"


def test_who_wakes_up_late_spoils_nothing(tmp_path: Path) -> None:
    """A process stands still in the middle of a write, and another writes the same meanwhile."""
    home, is_owner = tmp_path / "home", [True]

    def permit() -> None:
        if not is_owner[0]:
            raise NotPermitted("another owns it")

    def late() -> None:
        with replace_directory(home, permit=permit) as folder:
            (folder / "first").write_text("late")
            is_owner[0] = False
            with replace_directory(home) as other:
                (other / "first").write_text("new")
                with pytest.raises(FileNotFoundError):
                    (folder / "second").write_text("late")
                (other / "second").write_text("new")
            permit()

    with pytest.raises(NotPermitted):
        late()
    assert read(home) == ("new", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def tensors() -> dict[str, Tensor]:
    """Names in no order, of odd sizes, one of them not plain ASCII."""
    torch.manual_seed(0)
    names = ("z.lora_A", "layers.10.q", "layers.9.q", 'größe "q"', "a")
    return {name: torch.randn(3 + i, 7 * i + 1) for i, name in enumerate(names)}


def pending(content: dict[str, Tensor]) -> list[PendingTensor]:
    def read(tensor: Tensor, scratch: Scratch) -> Tensor:
        room = scratch.room(tuple(tensor.shape))
        return room.copy_(tensor)

    return [PendingTensor(name, tuple(t.shape), partial(read, t)) for name, t in content.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_bytes_are_those_of_safetensors(
    tmp_path: Path, metadata: dict[str, str] | None, dtype: torch.dtype
) -> None:
    content, path = tensors(), tmp_path / "file"
    size = write_tensors(path, pending(content), metadata=metadata, dtype=dtype)
    expected = save({name: t.to(dtype) for name, t in content.items()}, metadata=metadata)
    assert path.read_bytes() == expected
    assert size == len(expected)
    assert holds_tensors(path, pending(content), metadata=metadata, dtype=dtype)


def test_the_disk_begins_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[tuple[int, int]]()
    monkeypatch.setattr(safetensors_file, "_AHEAD_BYTES", 300)
    monkeypatch.setattr(safetensors_file, "_begin_writing", lambda _, *part: begun.append(part))
    size = write_tensors(tmp_path / "file", pending(tensors()))
    begun.sort()  # by several threads
    assert len(begun) > 1
    assert begun[-1][1] == size
    assert all(first[1] == second[0] for first, second in itertools.pairwise(begun))


def test_another_value_name_or_length_is_another_file(tmp_path: Path) -> None:
    content, path = tensors(), tmp_path / "file"
    write_tensors(path, pending(content))
    changed = content | {"a": content["a"] + 1}
    renamed = {name.replace("a", "b", 1): t for name, t in content.items()}
    assert not holds_tensors(path, pending(changed))
    assert not holds_tensors(path, pending(renamed))
    path.write_bytes(path.read_bytes()[:-1])
    assert not holds_tensors(path, pending(content))
    assert not holds_tensors(tmp_path / "missing", pending(content))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, path, pwrite = tensors(), tmp_path / "file", os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:5], offset))
    write_tensors(path, pending(content))
    assert all(torch.equal(t, content[name]) for name, t in load_file(path).items())


def test_a_full_disk_refuses_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> int:
        raise AssertionError("nothing may be written")

    monkeypatch.setattr(os, "pwrite", never)
    huge = [PendingTensor("huge", (1 << 30, 1 << 20), lambda scratch: torch.empty(0))]
    with pytest.raises(OSError, match=r"No space left|File too large"):
        write_tensors(tmp_path / "file", huge)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_named(tmp_path: Path, dtype: torch.dtype, wrong: float) -> None:
    content = tensors() | {"l": torch.tensor([[3.38e38, -3.38e38, 0.0, 1e-40]])}
    write_tensors(tmp_path / "file", pending(content), dtype=dtype)
    content["m"] = torch.tensor([[1.0, wrong]])
    with pytest.raises(ValueError, match="m must be finite, got NaN or inf"):
        write_tensors(tmp_path / "file", pending(content), dtype=dtype)
