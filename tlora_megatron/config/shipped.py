"""Finds files that lie outside the package: those of the checkout, or the wheel's copies."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


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
