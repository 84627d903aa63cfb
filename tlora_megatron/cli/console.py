"""Opens the consoles that commands print to."""

from __future__ import annotations

import os
import sys

from rich.console import Console

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
