"""Files that are written whole or not at all, JSON in files, and where the project's own files lie.

`UserFiles` walks one name at a time, relative to the folder opened before, so that nobody can put a
link in the way between a check and its use.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

BY_UMASK = 0o666
"""The mode of files that others may read if the user's umask lets them, as `open` makes them."""
_PACKAGE = Path(__file__).resolve().parent


@contextmanager
def replacing(
    path: Path,
    *,
    durable: bool = True,
    mode: int = 0o600,
    permit: Callable[[], None] | None = None,
) -> Iterator[BinaryIO]:
    """Yields a file to write, which takes the place of `path` at the end.

    A kill, a full disk or an exception inside the block leaves the old file whole, and several
    writers at once do not mix.

    Args:
        durable: flush the bytes and the name to the disk, so that they survive a power cut.
        mode: of the new file, less the process's umask.
        permit: called right before the file takes its name; raises if it must not any more.

    Raises:
        OSError: if the disk refuses.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(aside, flags, mode), "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if permit is not None:
            permit()
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        flush(path.parent)


def write_atomic(
    path: Path,
    content: bytes | str,
    *,
    durable: bool = True,
    mode: int = 0o600,
    permit: Callable[[], None] | None = None,
) -> None:
    """Replaces a file by bytes, or by text in UTF-8, as `replacing` does."""
    with replacing(path, durable=durable, mode=mode, permit=permit) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Replaces a file, of mode 0600, by a value in JSON, which knows no NaN or infinity."""
    write_atomic(path, json.dumps(value, allow_nan=False, separators=(",", ":")))


def read_json(path: Path) -> Any:
    """The value in a JSON file; None if there is no file, a `ValueError` names it if damaged."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} must hold JSON, got {error}") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file, a `ValueError` names it if damaged."""
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} must hold a JSON object, got {error}") from error


def modified_s(path: Path, missing: float = 0.0) -> float:
    """When a file was written last, or a folder last got or lost one; `missing` if it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return missing


def flush(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def shipped_folder(checkout: str, packaged: str, marker: str) -> Path:
    """Returns the folder that holds `marker`: the checkout's, or else the installed package's.

    Another wheel may have left a folder of that name in site-packages, so a file of ours is asked
    for.

    Args:
        packaged: the folder below the package, into which setup.py copies it (`BuildWithData`).
    """
    folder = _PACKAGE.parent / checkout
    return folder if (folder / marker).is_file() else _PACKAGE / packaged


OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would wait for ever


@dataclass(frozen=True, slots=True)
class UserFiles:
    """Opens the files that jobs name, where a service may read them."""

    root: Path | None = None
    """Every path must lie below it, and no part of it may be a link. None: the service reads
    whatever its own user may read, links included, as `tlora train` does."""

    def open_file(self, path: str | Path, what: str) -> BinaryIO:
        """Opens a regular file for reading; a `ValueError` names the field `what`."""
        try:
            handle = self._open(path, what, OPEN_FILE)
        except OSError as error:
            raise _refusal(what, "be a file that can be read", path, error) from error
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise ValueError(f"{what} must be a regular file, got {str(path)!r}")
        return os.fdopen(handle, "rb")

    @contextmanager
    def open_folder(self, path: str | Path, what: str) -> Iterator[int]:
        """Opens a folder as `open_file` does; yields a descriptor for `dir_fd`."""
        try:
            handle = self._open(path, what, OPEN_FOLDER)
        except OSError as error:
            raise _refusal(what, "be a folder that can be read", path, error) from error
        try:
            yield handle
        finally:
            os.close(handle)

    def _open(self, path: str | Path, what: str, flags: int) -> int:
        if "\0" in str(path):
            raise ValueError(f"{what} must hold no null character, got {str(path)!r:.200}")
        if self.root is None:
            return os.open(path, flags & ~os.O_NOFOLLOW)
        names = _names_below(self.root, path, what)
        handle = os.open(self.root, OPEN_FOLDER & ~os.O_NOFOLLOW)  # the operator's own choice
        for index, name in enumerate(names):
            is_last = index == len(names) - 1
            try:
                inner = os.open(name, flags if is_last else OPEN_FOLDER, dir_fd=handle)
            finally:
                os.close(handle)
            handle = inner
        return handle


def _names_below(root: Path, path: str | Path, what: str) -> list[str]:
    """The names that lead from the root to a path, none of which goes up."""
    text = os.fspath(path)
    if ".." in text.split("/"):
        raise ValueError(f"{what} must not go up with .., got {text!r:.200}")
    try:
        names = list(Path(text).relative_to(root).parts)
    except ValueError:
        raise ValueError(f"{what} must be a path below {root}, got {text!r:.200}") from None
    if not names:
        raise ValueError(f"{what} must be a path below {root}, got that folder itself")
    return names


def _refusal(what: str, rule: str, path: str | Path, error: OSError) -> ValueError:
    # A link to a file gives ELOOP, one in the place of a folder ENOTDIR.
    is_link = error.errno in (errno.ELOOP, errno.ENOTDIR)
    links = " (links are not followed)" if is_link else ""
    return ValueError(f"{what} must {rule}, got {os.fspath(path)!r:.200}: {error.strerror}{links}")
