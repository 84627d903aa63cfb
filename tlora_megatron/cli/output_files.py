"""Checks the files that a command is asked to write before it does any work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tlora_megatron.config.reader import must


def check_output(option: str, path: str | Path, keep: Iterable[str | Path]) -> None:
    """Refuses a directory, and a file that the command reads.

    Args:
        option: the command-line option that names the file.
        path: the file to write.
        keep: files that must stay as they are.

    Raises:
        ConfigError: naming the option.
    """
    path = Path(path)
    if path.is_dir():
        raise must(option, "name a file, not a directory", str(path))
    for file in map(Path, keep):
        if file.resolve() == path.resolve():
            raise must(option, f"leave {file}, which is read, as it is", str(path))
