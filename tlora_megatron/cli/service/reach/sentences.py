"""Sentences that commands say of a service, wherever it is."""

from __future__ import annotations

from collections.abc import Iterable

from tlora_megatron.cli.console import open_console
from tlora_megatron.config.reader import ConfigError, must


def missing_job(name: str) -> ConfigError:
    """The error for a name that no job has."""
    return must("NAME", "be the id or the name of a job", name, "`tlora jobs --all` lists them")


def warn(sentences: Iterable[str]) -> None:
    """Prints sentences about settings that have no effect."""
    console = open_console(stderr=True)
    for sentence in sentences:
        console.print(f"warning: {sentence}", style="yellow")
