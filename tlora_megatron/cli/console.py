"""Where the commands print, and which rank may."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDTH_WITHOUT_TERMINAL = 200


def global_rank() -> int:
    """This process's rank as torchrun set it; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def open_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: no markup, no wrapped lines, no 80 columns in files.

    Tables need `soft_wrap=False` where they are printed, to fit a terminal.
    """
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr,
        width=None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL,
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
