"""The moves that a service made: which job was paused, shrunk or grown.

They are read from what gangs told: a job's stay in a gang ends when it has left with a checkpoint,
and its next one begins to train with its next step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from tlora_megatron.service.control.executor import MAKES_ROOM
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import Store

MoveKind = Literal["pre-empt", "shrink", "grow", "move"]


@dataclass(kw_only=True, slots=True)
class Stay:
    """A job's time in a gang."""

    job: str
    gang: str
    gpus: tuple[tuple[int, int], ...]
    """Node and number of each."""
    joined_s: float
    """Unix time, as all of them."""
    first_step_s: float | None = None
    left_s: float | None = None
    """When it had left or ended; None: it was cut off."""
    step: int = 0
    """The last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A job that went on elsewhere, on other GPUs, or later."""

    job: str
    kind: MoveKind
    step: int
    """After which it was saved."""
    gpus_before: int
    gpus_after: int
    at_s: float


def stays(root: Path) -> list[Stay]:
    """All stays of all jobs, in the order in which they began."""
    found = [stay for folder in Home(root).gangs.iterdir() for stay in _stays_in(folder)]
    return sorted(found, key=lambda stay: stay.joined_s)


def _stays_in(folder: Path) -> Iterator[Stay]:
    spec = json.loads((folder / "spec.json").read_text())
    gpus = tuple((int(node), int(gpu)) for node, gpu in spec["gpus"])
    present: dict[str, Stay] = {}
    lines = (folder / "events.jsonl").read_text().splitlines()
    for event in map(json.loads, lines):
        kind, job, at_s = event["kind"], event["job"], event["at"]
        if kind == "joined":
            present[job] = Stay(job=job, gang=folder.name, gpus=gpus, joined_s=at_s)
            yield present[job]
        elif job in present and kind == "stepped":
            stay = present[job]
            stay.first_step_s = stay.first_step_s or at_s
            stay.step = int(event["body"]["step"])
        elif job in present and kind in ("left", "ended"):
            present.pop(job).left_s = at_s
        elif kind == "stopped":
            for stay in present.values():
                stay.left_s = at_s
            present.clear()


def moves(found: Sequence[Stay], store: Store) -> list[Move]:
    """The moves between the stays of each job, in order."""
    made = []
    for job in dict.fromkeys(stay.job for stay in found):
        own = [stay for stay in found if stay.job == job]
        events = store.events.after(0, job=job, kinds=["state"])
        paused_s = [event.at for event in events if event.body.get("why") == MAKES_ROOM]
        for old, new in pairwise(own):
            if old.left_s is None or new.first_step_s is None:
                continue
            was_paused = any(old.joined_s < at_s < new.joined_s for at_s in paused_s)
            made.append(
                Move(
                    job=job,
                    kind=_kind(len(old.gpus), len(new.gpus), was_paused=was_paused),
                    step=old.step,
                    gpus_before=len(old.gpus),
                    gpus_after=len(new.gpus),
                    at_s=old.left_s,
                )
            )
    return sorted(made, key=lambda move: move.at_s)


def _kind(before: int, after: int, *, was_paused: bool) -> MoveKind:
    if was_paused:
        return "pre-empt"
    return "move" if after == before else "shrink" if after < before else "grow"


def fused(found: Sequence[Stay]) -> set[tuple[str, ...]]:
    """Sets of jobs that trained in one gang at the same time, each in order."""
    together = set()
    for stay in found:
        others = {
            other.job
            for other in found
            if other.gang == stay.gang
            and other.joined_s <= stay.joined_s < (other.left_s or float("inf"))
        }
        if len(others) > 1:
            together.add(tuple(sorted(others)))
    return together
