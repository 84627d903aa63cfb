"""Jobs that are dropped while they are prepared."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.launch import HANG_S
from tlora_megatron.training.job_saves import SavePolicy, StagedJob
from tlora_megatron.training.resident import staging
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


def test_a_job_that_is_dropped_as_it_is_found_is_given_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
