"""A controller that is killed between any two things that it does leaves nothing half done.

SIGKILL is a `BaseException` here, thrown before or behind effects on the outside, drawn at random:
transactions, lease files, starts, commands. The next controller takes over at once, and is killed
in its turn. Real kills of real processes are in tests/integration/test_killed_service.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.helpers.live_service import LiveService
from tlora_megatron.service.control import executor

EVERYTHING = bool(os.environ.get("TLORA_ALL_TESTS"))
SEEDS = range(200 if EVERYTHING else 8)
CHANCES = (0.02, 0.05, 0.12)
"""Share of the effects at which a controller is killed."""
JOBS = {"one": 14, "two": 9, "three": 20}


class Killed(BaseException):
    """SIGKILL."""


class Reaper:
    """Kills before or behind some effects."""

    def __init__(self, seed: int) -> None:
        self.kills = 0
        self._random = Random(seed)
        self._chance = CHANCES[seed % len(CHANCES)]

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with its chance to be the last."""

        def effect(*args: Any, **fields: Any) -> Any:
            self.look()
            result = call(*args, **fields)
            self.look()
            return result

        return effect

    @contextmanager
    def transaction(self, whole: Callable[[], Any]) -> Iterator[None]:
        """A transaction that may be undone, or kept and followed by death."""
        with whole():
            yield
            self.look()
        self.look()

    def look(self) -> None:
        """Ends the controller, or not."""
        if self._random.random() < self._chance:
            self.kill()

    def kill(self) -> None:
        """Ends the controller."""
        self.kills += 1
        raise Killed


def _arm(service: LiveService, reaper: Reaper) -> None:
    """Lets the reaper see what the present controller does."""
    engine, store = service.controller.context.engine, service.store
    for name in ("start", "post", "kill"):
        setattr(engine, name, reaper.wrap(getattr(engine, name)))
    whole = store.transaction
    store.transaction = lambda: reaper.transaction(whole)  # type: ignore[method-assign]


def _trained(root: Path, reaper: Reaper | None, monkeypatch: pytest.MonkeyPatch) -> LiveService:
    service = LiveService(root, gpus=2, checkpoint_every_s=5.0)
    if reaper is not None:
        monkeypatch.setattr(executor, "write_lease", reaper.wrap(executor.write_lease))
        _arm(service, reaper)
    for name, steps in JOBS.items():
        service.submit(name, steps=steps, batch=6)
    alive = True
    while not service.is_over:
        try:
            if not alive:
                service.now_s += 0.5
                service.restart()
                assert reaper is not None, "nobody else kills"
                _arm(service, reaper)
                alive = True
            service.run()
        except Killed:
            alive = False
    return service


def _adapters(service: LiveService) -> dict[str, str]:
    rows = service.store.jobs.page(limit=100)
    return {row.name: service.adapter(row.id) for row in rows}


def test_a_controller_is_killed_at_random_effects(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = _adapters(_trained(root / "quiet", None, monkeypatch))
    kills = 0
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            reaper = Reaper(seed)
            service = _trained(root / str(seed), reaper, patch)
        assert set(service.states().values()) == {"finished"}, f"seed {seed}"
        assert _adapters(service) == undisturbed, f"seed {seed}"
        assert not service.engine.doubled, f"seed {seed}"
        kills += reaper.kills
    assert kills > len(SEEDS)
