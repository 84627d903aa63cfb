"""Where commands print to, and checks of the files that they are asked to write."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

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


_WIDTH_WITHOUT_TERMINAL = 200


def global_rank() -> int:
    """The rank that torchrun gave this process; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def open_console(*, stderr: bool = False) -> Console:
    """A console that prints text unchanged: no markup, no wrapping, no 80 columns in files.

    To fit a terminal, tables must be printed with `soft_wrap=False`.
    """
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr,
        width=None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL,
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
