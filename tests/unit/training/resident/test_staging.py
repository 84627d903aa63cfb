"""Jobs that come to a super-model: prepared on a thread, copied through pinned memory, agreed
upon.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.launch import HANG_S
from tlora_megatron.training.job_saves import SavePolicy, StagedJob
from tlora_megatron.training.resident import staging
from tlora_megatron.training.resident.saved_states import LockedRing
from tlora_megatron.training.resident.staging import Stager


class DroppedWhenFound:
    """An order of which another thread drops the job in the moment that it is found."""

    order: Any = None

    def __init__(self, drop: Any) -> None:
        self.__dict__ |= {"is_dropped": False, "found": None, "drop": drop}

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__[name] = value
        if name == "found":
            self.thread = threading.Thread(target=self.drop, args=("a",))
            self.thread.start()
            self.thread.join(0.2)


def test_a_job_dropped_as_it_is_found_is_given_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    metrics: Any = SimpleNamespace(close=lambda: closed.append("once"))
    job = StagedJob(
        state=SimpleNamespace(), digest="7", copied=None, metrics=metrics,
        saving=SavePolicy(),
    )  # type: ignore[arg-type]  # fmt: skip
    bank: Any = SimpleNamespace(device=torch.device("cpu"))
    stager = Stager(bank, None, None, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(stager, "_prepare", lambda _: job)
    order = DroppedWhenFound(stager.drop)
    monkeypatch.setattr(staging, "_Ordered", lambda _: order)
    stager.order("a", {})
    stager.close()
    assert stager._thread is not None
    stager._thread.join(HANG_S)
    order.thread.join(HANG_S)
    assert closed == ["once"]


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
        ring.copy(target.as_subclass(LateTarget), lambda room, value=value: room.copy_(value))
    stream.finish()
    for target, value in zip(targets, values, strict=True):
        assert torch.equal(target, value)
