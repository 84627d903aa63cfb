"""A resident super-model on several processes, driven schedule by schedule from a test."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.scenario import make_scenario
from tests.helpers.standing_world import world

WORKER = Path(__file__).parents[1] / "distributed" / "resident_worker.py"
Command = tuple[int, Mapping[str, Any]]
"""The look for commands, counted from 1, at which a command is there at the earliest."""
Event = tuple[str, str | None, dict[str, Any]]


class Resident(NamedTuple):
    folder: Path
    documents: dict[str, dict[str, Any]]
    """The jobs of the scenario by name, with absolute paths."""

    def run(self, commands: Sequence[Command]) -> list[Event]:
        """Hands commands over; returns all events until every job that was prepared is out."""
        with (self.folder / "schedules").open("w") as file:
            file.write(json.dumps(commands) + "\n")
        with (self.folder / "events").open() as file:
            answer = file.read()
        assert answer, "the resident's first process must answer, it has ended"
        return [tuple(event) for event in json.loads(answer)]

    def coming(
        self, look: int, name: str, job: str, *, body: Mapping[str, Any] = {}, **changes: Any
    ) -> list[Command]:
        """A job of the scenario, changed, is prepared under a name and joins."""
        document = {**self.documents[job], **changes}
        order = {"kind": "prepare", "job": name, "body": {"document": document, **body}}
        return [(look, order), (look, {"kind": "join", "job": name})]

    def job_dir(self, name: str) -> Path:
        return self.folder / "out" / "jobs" / name


@contextmanager
def resident(
    root: Path,
    nproc: int,
    parallel: Mapping[str, Any],
    *,
    base_model: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    **shape: Any,
) -> Iterator[Resident]:
    """Opens a super-model over a tiny base for the time of the block.

    Args:
        base_model, run: further keys of these sections.
        **shape: of the base, as `make_tiny_model` takes it.
    """
    document = json.loads(make_scenario(root, **shape).read_text())
    sections = {
        "base_model": {**document["base_model"], **(base_model or {})},
        "parallel": dict(parallel),
        "run": {"micro_batch_tokens": 256, "tensorboard": False, **(run or {})},
    }
    (root / "sections.json").write_text(json.dumps(sections))
    for name in ("schedules", "events"):
        os.mkfifo(root / name)
    ended: list[BaseException | None] = []
    thread = threading.Thread(target=_run_world, args=(root, nproc, ended))
    thread.start()
    documents = {
        job["name"]: {**job, "data": {k: str(root / v) for k, v in job["data"].items()}}
        for job in document["jobs"]
    }
    try:
        yield Resident(root, documents)
    finally:
        if not ended:
            (root / "schedules").write_text("null\n")
        thread.join()
    if ended[0] is not None:
        raise ended[0]


def _run_world(root: Path, nproc: int, ended: list[BaseException | None]) -> None:
    error: BaseException | None = None
    try:
        world(WORKER, nproc, root)
    except BaseException as raised:
        error = raised
    ended.append(error)
    # Whoever waits for an answer, or for somebody who reads, must not wait for ever.
    for name, mode in (("events", os.O_WRONLY), ("schedules", os.O_RDONLY)):
        try:
            os.close(os.open(root / name, mode | os.O_NONBLOCK))
        except OSError:
            continue
