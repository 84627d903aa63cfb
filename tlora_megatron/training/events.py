"""What happens while jobs train, as one stream of events. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class EventSink(Protocol):
    """Takes the events of a loop, on every rank that gives it one; mostly that is the first alone.

    Kinds are those of `service.messages.EventKind`, and for the process itself:

    - begun: before the first step; `{"jobs": {name: [step, last step or None]}}`.
    - progress: behind every round; `{"rounds": int, "tokens_per_s": float}`, over all so far.
    - out_of_memory: on any rank; `{"joining": [name]}`, jobs that were in their first round.
    """

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        """Takes one event; it must not wait.

        Args:
            job: its name; None = it is the whole loop's.
            body: values of JSON.
        """


class Reports:
    """Hands events on: to a sink, if there is one, and what is for people to the log.

    Args:
        logs: this process writes the log.
    """

    def __init__(self, sink: EventSink | None, *, logs: bool) -> None:
        self._sink = sink
        self._logs = logs

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        """Hands an event on; see `EventSink.emit`."""
        if self._sink is not None:
            self._sink.emit(kind, job, body)

    def note(self, job: str, message: str) -> None:
        """Reports a sentence about a job."""
        self.emit("note", job, {"message": message})
        if self._logs:
            logger.info("job %s: %s", job, message)
