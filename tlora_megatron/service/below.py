"""Opens files that a user has named, below a root and without following a single link.

The kernel walks one name at a time, relative to the folder opened before, so that nobody can put a
link in the way between a check and its use.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would wait for ever


@dataclass(frozen=True, slots=True)
class UserFiles:
    """Opens the files that jobs name, where a service may read them."""

    root: Path | None = None
    """Every path must lie below it, and no part of it may be a link. None: the service reads
    whatever its own user may read, links included, as `tlora train` does."""

    def open_file(self, path: str | Path, what: str) -> BinaryIO:
        """Opens a regular file for reading.

        Args:
            path: absolute.
            what: the field that names it, for the error.

        Raises:
            ValueError: naming the field and the path, if it may not or cannot be read.
        """
        try:
            handle = self._open(path, what, _FILE)
        except OSError as error:
            raise _refusal(what, "be a file that can be read", path, error) from error
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise ValueError(f"{what} must be a regular file, got {str(path)!r}")
        return os.fdopen(handle, "rb")

    @contextmanager
    def open_folder(self, path: str | Path, what: str) -> Iterator[int]:
        """Opens a folder; yields a descriptor for `dir_fd`, closed afterwards.

        Raises:
            ValueError: as `open_file` does.
        """
        try:
            handle = self._open(path, what, _FOLDER)
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
        handle = os.open(self.root, _FOLDER & ~os.O_NOFOLLOW)  # the operator's own choice
        for index, name in enumerate(names):
            is_last = index == len(names) - 1
            try:
                inner = os.open(name, flags if is_last else _FOLDER, dir_fd=handle)
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
