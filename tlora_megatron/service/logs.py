"""What a service says: in its folder with dates, and as JSON for programs that collect logs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import BufferingHandler
from pathlib import Path

LOG_NAME = "controller.log"
"""In the service's folder: what `tlora serve` and its process of HTTP say."""
_SAID = logging.getLogger("serve")
_SAID.setLevel(logging.INFO)
_SAID.propagate = False  # a terminal shows it already
FORMATS = ("text", "json")


def add_log_format(parser: argparse.ArgumentParser) -> None:
    """Adds the option to `tlora serve` and to the process of HTTP that it starts."""
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        default=FORMATS[0],
        help="json: what is said is an object a line with at, level, source, message and, of a "
        "job's change, job, name and tenant (default: text)",
    )


def json_line(level: str, source: str, message: str, **more: object) -> str:
    """One line of a log, with its time in UTC."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"at": at, "level": level, "source": source, "message": message, **more})


class JsonLines(logging.Formatter):
    """Formats each record so, with its traceback if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        more = {"error": self.formatException(record.exc_info)} if record.exc_info else {}
        more |= getattr(record, "more", {})
        return json_line(record.levelname.lower(), record.name, record.getMessage(), **more)


def formatter(log_format: str, text: str) -> logging.Formatter:
    """The formatter of a format's name; `text` is the pattern of lines for people."""
    return JsonLines() if log_format == "json" else logging.Formatter(text)


@contextmanager
def listen_to_warnings() -> Iterator[list[logging.LogRecord]]:
    """Yields the warnings that the package's loggers give meanwhile."""
    package = logging.getLogger(__name__.partition(".")[0])
    listener = BufferingHandler(sys.maxsize)
    listener.setLevel(logging.WARNING)
    package.addHandler(listener)
    try:
        yield listener.buffer
    finally:
        package.removeHandler(listener)


class LogFile(logging.FileHandler):
    """Appends to the log in a service's folder; what a full disk refuses follows when it has room.

    `tidy` lets the file begin anew.
    """

    def __init__(self, folder: Path, log_format: str) -> None:
        super().__init__(folder / LOG_NAME)
        self.setFormatter(formatter(log_format, "%(asctime)s  %(levelname)s: %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing: the terminal has the message."""


@contextmanager
def kept_log(folder: Path, log_format: str) -> Iterator[None]:
    """Writes what is said and the package's warnings to the log in a service's folder, too."""
    file, loggers = LogFile(folder, log_format), (_SAID, logging.getLogger("tlora_megatron"))
    for logger in loggers:
        logger.addHandler(file)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(file)
        file.close()


def log(sentence: str, **more: object) -> None:
    """Writes a sentence to the service's log, without secrets; `more` are fields of JSON."""
    _SAID.info(sentence.partition("#token=")[0], extra={"more": more})
