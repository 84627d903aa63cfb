"""Writing a whole directory so that a crash at any moment leaves the old one or the new one.

A symbolic link in the place of a directory of ours is never followed: it goes, what it leads to
stays. Files that are not ours are never touched. `replace_link` makes a link that is ours.
"""

from __future__ import annotations

import ctypes
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tlora_megatron.files import flush

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_TOKEN = 8
"""Hexadecimal digits that tell one writer's sibling from another's."""


Permit = Callable[[], None]
"""Called right before something takes its name; raises an `OSError` if it must not any more."""


class NotPermitted(OSError):
    """Somebody else owns what was to be written."""


def always() -> None:
    """Permits everything."""


@contextmanager
def replace_directory(
    directory: Path, names: Sequence[str] = (), permit: Permit = always, *, durable: bool = True
) -> Iterator[Path]:
    """Yields an empty sibling directory to fill, which takes the place of `directory` at the end.

    The files and their directory are flushed to the disk first. Where the file system can, the two
    names are exchanged in one step. Where it cannot (some network file systems), the old directory
    is renamed to `.NAME.previous` before the new one takes its name; `readable_directory` finds it
    there after a crash between the two renames. What a crash leaves behind is removed by the next
    write. An exception inside the block, a full disk included, leaves `directory` untouched.

    One writer at a time. A process that stood still while another took its place may find that out
    late: what it still writes lies in a sibling of its own, and `permit` keeps it from the name.

    Args:
        names: the files that are ours, last the one without which nobody reads the directory.
            Whatever else lies in `directory` then stays there as it is, and the new files take
            their places one by one: the last one is away meanwhile, unless it stays the same.
            Without names everything in `directory` is ours.
        permit: asked before anything is changed, and again when the new files are on the disk.
        durable: False = without any flush: whoever wrote it does that later.
    """
    directory = _not_followed(directory)
    incoming, previous = _incoming(directory), _previous(directory)
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} must be a directory, got a file")
    permit()
    directory.parent.mkdir(parents=True, exist_ok=True)
    if _is_folder(previous) and not os.path.lexists(directory):
        previous.rename(directory)
    for left in [*_leftovers(directory.parent, glob.escape(directory.name)), previous]:
        _remove(left, names, directory)
    incoming.mkdir()
    try:
        yield incoming
        for path in [*sorted(incoming.rglob("*")), incoming] if durable else ():
            flush(path)
        permit()
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise
    if names and _is_folder(directory) and _others(directory, names):
        _put_into(incoming, directory, names)
    else:
        _swap(incoming, directory)
    if durable:
        flush(directory.parent)
    _remove(incoming, names, directory)
    _remove(previous, names, directory)


def replace_link(link: Path, target: str, permit: Permit = always) -> None:
    """Lets a symbolic link lead to `target` in one step; a folder of ours in its place goes.

    It is not flushed to the disk.

    Args:
        permit: asked before anything is changed.
    """
    link = _not_followed(link)
    incoming, previous = _incoming(link), _previous(link)
    permit()
    for left in _leftovers(link.parent, glob.escape(link.name)):
        _remove(left, (), link)
    incoming.symlink_to(target)
    if _is_folder(link):
        _swap(incoming, link)
    else:
        os.replace(incoming, link)
    _remove(incoming, (), link)
    _remove(previous, (), link)


def readable_directory(directory: Path) -> Path:
    """Returns `directory`, or its predecessor if a crash came between the two renames."""
    directory = _not_followed(directory)
    previous = _previous(directory)
    return previous if _is_folder(previous) and not directory.exists() else directory


def remove_directory(directory: Path, names: Sequence[str]) -> None:
    """Removes the files `names` of a directory, the last one first, and with nothing else in it
    the directory; of a link the link alone.
    """
    if directory.is_symlink():
        directory.unlink()
        return
    for name in reversed(names):
        (directory / name).unlink(missing_ok=True)
    with suppress(OSError):  # somebody else's files are in it
        directory.rmdir()


def remove_leftovers(parent: Path, pattern: str, names: Sequence[str]) -> None:
    """Removes what a crash left behind of writes to directories that match a pattern."""
    for left in _leftovers(parent, pattern):
        remove_directory(left, names)


def _not_followed(directory: Path) -> Path:
    """An absolute path; links are followed above the directory, never itself."""
    directory = Path(os.path.abspath(directory))
    return directory.parent.resolve() / directory.name


def _incoming(directory: Path) -> Path:
    """A sibling of this writer's own."""
    return directory.with_name(f".{directory.name}.{secrets.token_hex(_TOKEN // 2)}.incoming")


def _leftovers(parent: Path, pattern: str) -> list[Path]:
    """What writes to directories of a pattern have left, whoever wrote."""
    return list(parent.glob(f".{pattern}.{'[0-9a-f]' * _TOKEN}.incoming"))


def _previous(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.previous")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _others(directory: Path, names: Sequence[str]) -> list[Path]:
    return [path for path in directory.iterdir() if path.name not in names]


def _swap(incoming: Path, directory: Path) -> None:
    """Gives `incoming` the name `directory`; the old one is then called incoming or previous."""
    if os.path.lexists(directory):
        if _exchange(incoming, directory):
            return
        directory.rename(_previous(directory))
    incoming.rename(directory)


def _put_into(incoming: Path, directory: Path, names: Sequence[str]) -> None:
    """Moves the files into a directory beside somebody else's."""
    mark = names[-1]
    old, new = directory / mark, incoming / mark
    if not (old.is_file() and old.read_bytes() == new.read_bytes()):
        old.unlink(missing_ok=True)
        flush(directory)
    for name in names:
        os.rename(incoming / name, directory / name)
    flush(directory)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names in one step; False where the kernel or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    return renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _remove(path: Path, names: Sequence[str], home: Path) -> None:
    """Removes what is left of an old or a new directory; somebody else's files go home."""
    if not _is_folder(path):
        path.unlink(missing_ok=True)
        return
    if not names:
        shutil.rmtree(path)
        return
    for other in _others(path, names):
        if os.path.lexists(home / other.name):
            raise FileExistsError(f"{other} must be moved away, {home} holds another one")
        home.mkdir(exist_ok=True)
        other.rename(home / other.name)
    remove_directory(path, names)
