"""Reads a saved state on a thread, while the job that asks for it waits and the others train."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

import torch

from tlora_megatron.model.backbone import Backbone
from tlora_megatron.training.driven.state import DrivenState
from tlora_megatron.training.formats.checkpoint import find_checkpoint

_THREADS = 2
"""That read: the thread that trains has to get its turn in Python."""


class ReadState(NamedTuple):
    """A state that a job can take up."""

    buffers: dict[str, torch.Tensor]
    """Buffers of its slab on this rank, on the host."""
    updates: int


class StateLoad:
    """One state on its way into a job.

    Args:
        number: of the request.
        moments: Adam's, too.
    """

    def __init__(
        self, job: DrivenState, number: int, folder: Path, spec: Backbone, *, moments: bool
    ) -> None:
        self.number = number
        self.found: ReadState | None = None
        self.error: str | None = None
        """Why there is none."""
        arguments = (job, folder, spec, moments)
        name = "tlora-load-state"
        threading.Thread(target=self._work, args=arguments, name=name, daemon=True).start()

    @property
    def state(self) -> int | None:
        """None while it is read, 1 once it is there, negative if it cannot be read."""
        if self.error is not None:
            return -1
        return None if self.found is None else 1

    def _work(self, job: DrivenState, folder: Path, spec: Backbone, moments: bool) -> None:
        try:
            self.found = _read(job, folder, spec, moments=moments)
        except Exception as error:  # whatever is wrong with one state, the others train on
            is_told = isinstance(error, ValueError | OSError)
            text = str(error) if is_told else f"{type(error).__name__}: {error}"
            self.error = text.replace(f"{folder}", folder.name)


def _read(job: DrivenState, folder: Path, spec: Backbone, *, moments: bool) -> ReadState:
    found = find_checkpoint(folder)
    if found is None:
        raise ValueError(f"path must lead to a state that was saved, got {folder.name}")
    found.check_fits(job.spec, job.data, spec)
    updates = int(found.state["progress"]["updates"]) if moments else 0
    return ReadState(found.read(job.adapter.slab, _THREADS, moments=moments), updates)
