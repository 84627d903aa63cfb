"""The trace of nano-batches on a disk that refuses it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tlora_megatron.training.nano.trace import TRACE_FILE, NanoTrace, TraceLine, read_trace


def line(step: int) -> TraceLine:
    return TraceLine(
        step=step, nano_batches=1, time_s=0.5, tokens=9, phase="explore", kept=1, jobs=1, mix="m"
    )


def test_a_disk_that_fills_up_within_a_line_spoils_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = NanoTrace(tmp_path)
    trace.begin()
    trace.append(line(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (trace.path.stat().st_size + 10, hard))
    try:
        trace.append(line(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    trace.append(line(3))
    assert read_trace(tmp_path) == [line(1), line(3)]
    assert [record.message.partition(": ")[0] for record in caplog.records] == [
        f"{trace.path} could not be written"
    ]


def test_a_trace_that_cannot_be_begun_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other processes wait for what the writer has to tell."""
    (tmp_path / TRACE_FILE).mkdir()
    NanoTrace(tmp_path).begin()
    assert "could not be emptied" in caplog.text
