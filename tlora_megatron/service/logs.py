"""Log lines of a service as JSON, for programs that collect logs: one object on each line."""

from __future__ import annotations

import argparse
import json
import logging
from datetime import UTC, datetime

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
        return json_line(record.levelname.lower(), record.name, record.getMessage(), **more)


def formatter(log_format: str, text: str) -> logging.Formatter:
    """The formatter of a format's name; `text` is the pattern of lines for people."""
    return JsonLines() if log_format == "json" else logging.Formatter(text)
