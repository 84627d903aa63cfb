"""Checks the files that a command is asked to write before it does any work."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from tlora_megatron.config.reader import must


def check_output(option: str, path: str | Path, keep: Iterable[str | Path]) -> None:
    """Refuses a directory, a file in a folder that is not there, and one that the command reads.

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
    if not path.parent.is_dir():
        is_file = path.parent.exists()
        remedy = "" if is_file else f"mkdir -p {shlex.quote(str(path.parent))}"
        raise must(option, "be in a folder that exists", str(path), remedy)
    for file in map(Path, keep):
        if file.resolve() == path.resolve():
            raise must(option, f"leave {file}, which is read, as it is", str(path))
