"""Megatron-LM's trainer under the flag, with something between it and the session."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Callable, Sequence
from typing import Any

from scripts.bench.harness.processes import wait_for_turn
from tlora_megatron import launch

Iteration = Callable[[Any, Callable[[], Any]], Any]
"""Gets the session and what runs an iteration of it; returns the iteration's result."""


def launch_watched(argv: Sequence[str], begin: Callable[[], Iteration]) -> None:
    """Does what `-m tlora_megatron.launch ARGV` does; nothing is compiled in the checkout.

    Args:
        begin: Called behind the hooks' installation, before anything of the trainer runs.
    """
    if not hasattr(typing, "override"):  # from Python 3.12 on, which newer checkouts ask for
        typing.override = lambda method: method
    install = launch.install

    def install_watched() -> None:
        install()
        _put_between(begin())
        wait_for_turn()

    launch.install = install_watched
    launch.main(list(argv))


def _put_between(iteration: Iteration) -> None:
    from tlora_megatron.integrations.megatron_lm.session import Session

    initialize: Any = importlib.import_module("megatron.training.initialize")
    initialize._compile_dependencies = lambda *_: None
    train_step = Session.train_step

    def watched(session: Any, run_step: Any) -> Any:
        return iteration(session, lambda: train_step(session, run_step))

    Session.train_step = watched  # type: ignore[method-assign]
