"""The words of the command line that say how long a service keeps what has ended."""

from __future__ import annotations

import argparse

from tlora_megatron.config.reader import must

_DAYS = 30.0
_LEAST_DAYS = 1.0
"""Answers are kept for a day, whatever becomes of the session."""
_DAY_S = 86_400.0
KEEP_SESSIONS_S = _DAYS * _DAY_S


def add_keeping_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the words to `tlora serve`, and to the process of HTTP that it starts."""
    parser.add_argument(
        "--keep-sessions",
        type=float,
        default=_DAYS,
        metavar="DAYS",
        help="keep sessions of Tinker's clients for so long after their end; checkpoints stay "
        f"(default: {_DAYS:g})",
    )


def keeping_words(args: argparse.Namespace) -> list[str]:
    """The same words again, for a process that is started."""
    return ["--keep-sessions", str(args.keep_sessions)]


def keep_sessions_s(args: argparse.Namespace) -> float:
    """Seconds for which sessions are kept.

    Raises:
        ConfigError: if they are too few.
    """
    if not args.keep_sessions >= _LEAST_DAYS:
        raise must("--keep-sessions", f"be at least {_LEAST_DAYS:g} day", args.keep_sessions)
    return float(args.keep_sessions * _DAY_S)
