"""Tells an adapter that was written anew from the one before; without torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
CHECKPOINT_FILES = ("state.json", "adapter.safetensors")


class AdapterKey(NamedTuple):
    """A folder of an adapter with the files that it had: one that is written anew is another."""

    folder: str
    is_checkpoint: bool
    """True for a job's `checkpoints/step_N`, False for what PEFT loads."""
    files: tuple[tuple[int, int, int], ...]
    """inode, size and time of each"""

    @classmethod
    def of(cls, folder: str) -> AdapterKey:
        """Looks at a folder.

        Raises:
            ValueError: if it holds no adapter.
        """
        path = Path(folder)
        is_checkpoint = (path / CHECKPOINT_FILES[0]).is_file()
        names = CHECKPOINT_FILES if is_checkpoint else PEFT_FILES
        try:
            found = [(path / name).stat() for name in names]
        except OSError as error:
            raise ValueError(
                f"adapter must be a folder with {' and '.join(names)}, got {folder}: "
                f"{error.strerror}"
            ) from error
        files = tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)
        return cls(folder, is_checkpoint, files)
