"""Runs of a scenario: those of one number of processes share one set of them.

Starting processes costs more than training a tiny model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.standing_world import forked, world

TRAINER = Path(__file__).with_name("train_worker.py")
World = Callable[[int], Path]
"""A function from a number of processes to the folder of its runs' outputs."""
Layouts = Mapping[int, Mapping[str, tuple[str, ...]]]
"""By number of processes and name, what a run sets."""


class Case(NamedTuple):
    config: Path
    overrides: Sequence[str] = ()


def cases_of(config: Path, layouts: Mapping[str, Sequence[str]]) -> dict[str, Case]:
    return {name: Case(config, overrides) for name, overrides in layouts.items()}


def entry(
    config: Path, output_dir: Path, overrides: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    """A case as workers read it."""
    return {"config": str(config), "output_dir": str(output_dir), "set": [*overrides], **more}


def run_cases(
    world_size: int, cases: Sequence[Mapping[str, Any]], path: Path, *, worker: Path = TRAINER
) -> str:
    """Runs cases one after another in one set of processes; returns what they wrote.

    Args:
        cases: as the worker reads them from `path`.
    """
    path.write_text(json.dumps(list(cases)))
    if world_size == 1:
        return forked(worker, path)
    return world(worker, world_size, path)


def worlds(
    root: Path, cases_of: Callable[[int], Mapping[str, Case]], *, worker: Path = TRAINER
) -> World:
    """A function that runs the cases of a number of processes, when first asked for them.

    Their outputs lie under their names in the folder that it returns, and `log.txt` beside them.
    Cases that failed are not run again for the next test, which fails with the same words.
    """
    failed: dict[int, AssertionError] = {}

    @functools.cache
    def run(world_size: int) -> Path:
        if world_size in failed:
            raise failed[world_size]
        out = root / f"world{world_size}"
        out.mkdir(parents=True)
        entries = [
            entry(case.config, out / name, case.overrides)
            for name, case in cases_of(world_size).items()
        ]
        try:
            log = run_cases(world_size, entries, out / "cases.json", worker=worker)
        except AssertionError as error:
            failed[world_size] = error
            raise
        (out / "log.txt").write_text(log)
        return out

    return run


class Life(NamedTuple):
    world_size: int
    overrides: Sequence[str]
    stop: tuple[str, int] | None
    """A job, and its step at which all is stopped; None = run to the end."""


def live(config: Path, root: Path, lives: Sequence[Life], *, every: int = 2) -> Path:
    """Runs one run in several lives, each with processes of its own, and saves every few steps.

    Returns:
        Its output folder, below `root`.
    """
    out = root / "out"
    for index, life in enumerate(lives):
        overrides = [f"run.checkpoint_every_steps={every}", *life.overrides]
        case = entry(config, out, overrides, stop=life.stop)
        run_cases(life.world_size, [case], root / f"{index}.json")
    return out


def layout_params(layouts: Layouts) -> list[Any]:
    """A test's parameters `world_size` and `layout`: all of them, by name."""
    return [
        pytest.param(size, name, marks=[pytest.mark.four_processes] if size == 4 else [], id=name)
        for size, mine in layouts.items()
        for name in mine
    ]
