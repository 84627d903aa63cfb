"""Files that are written whole or not at all, JSON in files, and where the project's own files lie.

Nothing here needs more than the standard library, so every part of the package may use it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Replaces a file, of mode 0600, by a value in JSON.

    Raises:
        OSError: if the disk refuses.
        ValueError: if the value holds NaN or an infinity, which JSON does not know.
    """
    write_atomic(path, json.dumps(value, allow_nan=False, separators=(",", ":")))


def read_json(path: Path) -> Any:
    """The value in a JSON file; None if there is no file.

    Raises:
        ValueError: naming the file, if it holds something else.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} must hold JSON, got {error}") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file.

    Raises:
        ValueError: naming the file, if it holds anything else.
    """
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} must hold a JSON object, got {error}") from error


def flush(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def shipped_folder(checkout: str, packaged: str, marker: str) -> Path:
    """Returns the folder that holds `marker`: the checkout's, or else the installed package's.

    A file of ours is asked for rather than the folder alone: another wheel may have left a folder
    of that name in site-packages, beside this package.

    Args:
        checkout: the folder below the repository's root.
        packaged: the folder below the package, into which setup.py copies it (`BuildWithData`).
        marker: a file that this project always has there.
    """
    folder = _PACKAGE.parent / checkout
    return folder if (folder / marker).is_file() else _PACKAGE / packaged
