"""The ring's order, on a stand-in for a GPU that copies as late as it may."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from tlora_megatron.training.resident.saved_states import LockedRing


class LateStream:
    """Keeps copies until somebody waits for them."""

    def __init__(self) -> None:
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []

    def finish(self) -> None:
        for target, values in self.queued:
            target.data[:] = values
        self.queued.clear()


class LateTarget(torch.Tensor):
    """Memory of the GPU: what is copied into it is queued."""

    stream: LateStream

    def copy_(self, values: torch.Tensor, non_blocking: bool = False) -> Any:
        assert non_blocking
        self.stream.queued.append((self.as_subclass(torch.Tensor), values))
        return self


def _fill(value: torch.Tensor, room: torch.Tensor) -> None:
    room.copy_(value)


@pytest.mark.parametrize("parts", [(3, 9), (16, 16, 1, 2, 7), (160,), (17, 16, 54)])
def test_buffers_are_not_filled_again_before_they_are_copied(
    monkeypatch: pytest.MonkeyPatch, parts: tuple[int, ...]
) -> None:
    stream: Any = LateStream()

    class Event:
        def __init__(self, blocking: bool) -> None:
            self.is_recorded = False

        def record(self, on: LateStream) -> None:
            self.is_recorded = on is stream

        def synchronize(self) -> None:
            if self.is_recorded:
                stream.finish()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(LateTarget, "stream", stream, raising=False)
    ring = LockedRing(stream, torch.full((3, 16), torch.nan))
    values = [torch.rand(part) for part in parts]
    targets = [torch.full_like(value, torch.nan) for value in values]
    for target, value in zip(targets, values, strict=True):
        ring.copy(target.as_subclass(LateTarget), partial(_fill, value))
    stream.finish()
    for target, value in zip(targets, values, strict=True):
        assert torch.equal(target, value)
