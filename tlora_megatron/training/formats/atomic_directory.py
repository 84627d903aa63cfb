"""Writing a whole directory so that a crash at any moment leaves the old one or the new one."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """Yields an empty sibling directory to fill, which takes the place of `directory` at the end.

    The files and their directory are flushed to the disk first. Where the file system can, the two
    names are exchanged in one step. Where it cannot (some network file systems), the old directory
    is renamed to `.NAME.previous` before the new one takes its name; `readable_directory` finds it
    there after a crash between the two renames. What a crash leaves behind is removed by the next
    write. An exception inside the block, a full disk included, leaves `directory` untouched.

    One writer at a time; whatever else lies in the old `directory` goes with it.

    Raises:
        OSError: if the file system refuses.
    """
    directory = Path(directory).resolve()
    incoming, previous = _incoming(directory), _previous(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    if previous.exists() and not directory.exists():
        previous.rename(directory)
    _remove(incoming)
    _remove(previous)
    incoming.mkdir()
    try:
        yield incoming
        for path in [*sorted(incoming.rglob("*")), incoming]:
            _flush(path)
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise
    _swap(incoming, directory)
    _flush(directory.parent)
    _remove(incoming)
    _remove(previous)


def readable_directory(directory: Path) -> Path:
    """Returns `directory`, or its predecessor if a crash came between the two renames."""
    directory = Path(directory).resolve()
    previous = _previous(directory)
    return previous if previous.exists() and not directory.exists() else directory


def _incoming(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.incoming")


def _previous(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.previous")


def _swap(incoming: Path, directory: Path) -> None:
    """Gives `incoming` the name `directory`; the old one is then called incoming or previous."""
    if directory.exists():
        if _exchange(incoming, directory):
            return
        directory.rename(_previous(directory))
    incoming.rename(directory)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names in one step; False where the kernel or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    return renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _flush(path: Path) -> None:
    """Waits until a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
