"""Finds the safetensors of a Hugging Face directory, and has the disk read them ahead of use."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def weight_files(directory: Path) -> list[Path]:
    """Returns the files of the weights: those that the index names, or the single one.

    Raises:
        ValueError: if there are no safetensors, a file is missing or the index is malformed.
    """
    index = directory / _INDEX
    if index.is_file():
        names = _read_index(index)
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ValueError(f"{index} must name files that exist, got {', '.join(missing)}")
        return [directory / name for name in names]
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    pickles = [name for name in found if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        raise ValueError(f"weights in {directory} must be safetensors, got {pickles[0]} (pickle)")
    raise ValueError(f"{directory} must hold {_SINGLE} or {_INDEX}, got {found or 'no files'}")


def read_ahead(directory: Path) -> None:
    """Asks the disk for all weights, on a thread: a cold disk then reads while Python imports.

    Does nothing where they would take more than half of this machine's memory. Mistakes in the
    directory are left to who reads the weights.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def work() -> None:
        with suppress(OSError, ValueError):
            files = weight_files(directory)
            if sum(file.stat().st_size for file in files) > memory / 2:
                return
            for file in files:
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    threading.Thread(target=work, name="read ahead", daemon=True).start()


def _read_index(index: Path) -> list[str]:
    try:
        names = json.loads(index.read_text())["weight_map"].values()
        return sorted({str(name) for name in names})
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} must be JSON with a weight_map, got {error!r}") from error
