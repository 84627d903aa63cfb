"""The environment of a process in a worker slot of this host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.launch import HANG_S
from tlora_megatron.service.engines.protocol import WorkerSlots


def test_a_slot_of_several_cores_has_a_worker_that_can_be_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    environment = WorkerSlots(devices=(), count=1).environment(0)
    assert environment["OMP_NUM_THREADS"] == "4"
    code = "import numpy, os; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout == "1\n", done.stderr
